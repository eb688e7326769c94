/* SPDX-License-Identifier: Apache-2.0 */
/* What the tokenizer needs of Unicode beyond PCRE2 and utf8proc: UTF-8 itself, two properties, and
 * the differences between the versions of Unicode that the libraries and the tokenizers package
 * were built with. Its patterns know Unicode 16 (PCRE2 10.42: 14); its normalizer Unicode 9
 * (utf8proc 2.8: 15). Texts with characters from between must still give the same ids.
 */
#include <string.h>

#include <utf8proc.h>

#include "model/tokenizer_priv.h"

size_t model_utf8_length(unsigned char first)
{
    if (first < 0x80)
        return 1;
    if (first < 0xC2 || first > 0xF4)
        return 0;
    return first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
}

bool model_utf8_second(unsigned char first, unsigned char second)
{
    /* E0 and F0 would be overlong, ED a surrogate, F4 over 10FFFF. */
    unsigned lo = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    unsigned hi = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    return second >= lo && second <= hi;
}

size_t model_utf8_valid(const char *s, size_t n)
{
    const unsigned char *p = (const unsigned char *)s;
    for (size_t i = 0; i < n;) {
        uint64_t eight;
        if (n - i >= 8 && (memcpy(&eight, p + i, 8), (eight & 0x8080808080808080ULL) == 0)) {
            i += 8; /* ASCII, most of most texts */
            continue;
        }
        size_t len = model_utf8_length(p[i]);
        if (len == 0 || len > n - i || (len > 1 && !model_utf8_second(p[i], p[i + 1])))
            return i;
        for (size_t k = 2; k < len; k++)
            if ((p[i + k] & 0xC0) != 0x80)
                return i;
        i += len;
    }
    return n;
}

uint32_t model_utf8_get(const char *s, size_t *len)
{
    const unsigned char *p = (const unsigned char *)s;
    if (p[0] < 0x80) {
        *len = 1;
        return p[0];
    }
    if (p[0] < 0xE0) {
        *len = 2;
        return (uint32_t)(p[0] & 0x1F) << 6 | (p[1] & 0x3F);
    }
    if (p[0] < 0xF0) {
        *len = 3;
        return (uint32_t)(p[0] & 0x0F) << 12 | (uint32_t)(p[1] & 0x3F) << 6 | (p[2] & 0x3F);
    }
    *len = 4;
    return (uint32_t)(p[0] & 7) << 18 | (uint32_t)(p[1] & 0x3F) << 12 |
           (uint32_t)(p[2] & 0x3F) << 6 | (p[3] & 0x3F);
}

size_t model_utf8_put(uint32_t cp, char *out)
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    size_t len = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    static const unsigned char mark[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = len - 1; i > 0; i--, cp >>= 6)
        out[i] = (char)(0x80 | (cp & 0x3F));
    out[0] = (char)(mark[len] | cp);
    return len;
}

struct range {
    uint32_t from, to;
};

static bool in_ranges(const struct range *r, size_t n, uint32_t cp)
{
    size_t lo = 0, hi = n; /* first range that ends at or behind cp */
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (r[mid].to < cp)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < n && r[lo].from <= cp;
}
#define IN(table, cp) in_ranges(table, sizeof(table) / sizeof *(table), cp)

bool model_unicode_is_space(uint32_t cp)
{
    static const struct range space[] = {
        {0x9, 0xD},       {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
        {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000},
    };
    return IN(space, cp);
}

bool model_unicode_is_word(uint32_t cp)
{
    /* Alphabetic beyond letters, marks and letter-numbers; join controls. */
    static const struct range more[] = {
        {0x200C, 0x200D},   {0x24B6, 0x24E9},   {0x1F130, 0x1F149},
        {0x1F150, 0x1F169}, {0x1F170, 0x1F189},
    };
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return IN(more, cp);
    }
}

bool model_unicode_is_new_mark(uint32_t cp)
{
    /* Marks with a combining class, and characters that compose or decompose, of Unicode 10 to
     * 16; where a whole block is that new, the block. */
    static const struct range marks[] = {
        {0x7FD, 0x7FD},     {0x897, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
        {0xC3C, 0xC3C},     {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},
        {0x1ABF, 0x1AEB},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x105C0, 0x105FF},
        {0x10D24, 0x10D27}, {0x10D40, 0x10D8F}, {0x10EAB, 0x10EAC}, {0x10EFA, 0x10EFF},
        {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B},
        {0x11380, 0x113FF}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x11930, 0x11943},
        {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99},
        {0x11D42, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x16100, 0x1613F},
        {0x16D40, 0x16D7F}, {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136},
        {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1E5D0, 0x1E5FF},
    };
    return IN(marks, cp);
}

const char *const model_unicode_class_space =
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"
    "\\x{3000}";

const char *const model_unicode_class_letter =
    "\\x{1c89}-\\x{1c8a}\\x{a7cb}-\\x{a7cd}\\x{a7da}-\\x{a7dc}\\x{105c0}-\\x{105f3}"
    "\\x{10d4a}-\\x{10d65}\\x{10d6f}-\\x{10d85}\\x{10ec2}-\\x{10ec4}\\x{1123f}-\\x{11240}"
    "\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}\\x{11390}-\\x{113b5}\\x{113b7}\\x{113d1}\\x{113d3}"
    "\\x{11bc0}-\\x{11be0}\\x{11f02}\\x{11f04}-\\x{11f10}\\x{11f12}-\\x{11f33}\\x{1342f}"
    "\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1611d}\\x{16d40}-\\x{16d6c}"
    "\\x{18cff}\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}\\x{1e030}-\\x{1e06d}"
    "\\x{1e4d0}-\\x{1e4eb}\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}\\x{2b739}\\x{2ebf0}-\\x{2ee5d}"
    "\\x{31350}-\\x{323af}";

const char *const model_unicode_class_number =
    "\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}\\x{11f50}-\\x{11f59}"
    "\\x{16130}-\\x{16139}\\x{16d70}-\\x{16d79}\\x{1ccf0}-\\x{1ccf9}\\x{1d2c0}-\\x{1d2d3}"
    "\\x{1e4f0}-\\x{1e4f9}\\x{1e5f1}-\\x{1e5fa}";
