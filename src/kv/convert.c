/* SPDX-License-Identifier: Apache-2.0 */
/* Element conversion through float32: widening is exact, so each element is rounded once. */
#include <string.h>

#include "kv/kv_priv.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pages, digests and files hold little-endian elements"
#endif

#define TILE 64u /* elements widened at a time: loads and stores become plain loops */

static inline uint32_t f16_to_f32(uint32_t h)
{
    uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u) /* infinity, NaN */
        return sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    if (rest >= 0x0400u)
        return sign | ((rest << 13) + ((127u - 15u) << 23));
    /* Subnormal: rest * 2^-24, exact in float32. */
    float f = (float)rest * 0x1p-24f;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return sign | bits;
}

static inline uint32_t f32_to_f16(uint32_t u)
{
    uint32_t sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u)
        return sign | 0x7e00u | (rest >> 13 & 0x3ffu);
    if (rest >= 0x477ff000u) /* 65520 and more round to infinity */
        return sign | 0x7c00u;
    if (rest >= 0x38800000u) { /* 2^-14: normal; the carry may raise the exponent */
        rest -= (127u - 15u) << 23;
        return sign | (rest + 0xfffu + (rest >> 13 & 1u)) >> 13;
    }
    /* Adding 0.5 aligns the unit of the last place to 2^-24, f16's smallest step: the addition
     * itself rounds to nearest even. */
    float f;
    memcpy(&f, &rest, sizeof f);
    f += 0.5f;
    memcpy(&rest, &f, sizeof rest);
    return sign | (rest - 0x3f000000u);
}

static inline uint32_t f32_to_bf16(uint32_t u)
{
    uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    uint32_t quiet = u >> 16 | 0x40u;
    return (u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}

static inline uint32_t load16(const uint8_t *p)
{
    uint16_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline void store16(uint8_t *p, uint32_t x)
{
    uint16_t y = (uint16_t)x;
    memcpy(p, &y, sizeof y);
}

static void widen(uint32_t *tile, const uint8_t *src, uint32_t dtype, int64_t stride, uint32_t n)
{
    if (dtype == BATON_F32)
        for (uint32_t i = 0; i < n; i++)
            memcpy(&tile[i], src + i * stride, 4);
    else if (dtype == BATON_F16)
        for (uint32_t i = 0; i < n; i++)
            tile[i] = f16_to_f32(load16(src + i * stride));
    else if (stride == 2) /* apart, so that the compiler sees a constant stride */
        for (uint32_t i = 0; i < n; i++)
            tile[i] = load16(src + 2 * (size_t)i) << 16;
    else
        for (uint32_t i = 0; i < n; i++)
            tile[i] = load16(src + i * stride) << 16;
}

static void narrow(uint8_t *dst, uint32_t dtype, int64_t stride, const uint32_t *tile, uint32_t n)
{
    if (dtype == BATON_F32)
        for (uint32_t i = 0; i < n; i++)
            memcpy(dst + i * stride, &tile[i], 4);
    else if (dtype == BATON_F16)
        for (uint32_t i = 0; i < n; i++)
            store16(dst + i * stride, f32_to_f16(tile[i]));
    else if (stride == 2)
        for (uint32_t i = 0; i < n; i++)
            store16(dst + 2 * (size_t)i, f32_to_bf16(tile[i]));
    else
        for (uint32_t i = 0; i < n; i++)
            store16(dst + i * stride, f32_to_bf16(tile[i]));
}

static void copy_bits(uint8_t *dst, int64_t dst_stride, const uint8_t *src, int64_t src_stride,
                      size_t bytes, uint32_t n)
{
    if (dst_stride == (int64_t)bytes && src_stride == (int64_t)bytes)
        memcpy(dst, src, n * bytes);
    else if (bytes == 2)
        for (uint32_t i = 0; i < n; i++)
            memcpy(dst + i * dst_stride, src + i * src_stride, 2);
    else
        for (uint32_t i = 0; i < n; i++)
            memcpy(dst + i * dst_stride, src + i * src_stride, 4);
}

void kv_convert(uint8_t *dst, uint32_t dst_dtype, int64_t dst_stride, const uint8_t *src,
                uint32_t src_dtype, int64_t src_stride, uint32_t n)
{
    if (dst_dtype == src_dtype) {
        copy_bits(dst, dst_stride, src, src_stride, kv_dtype_bytes(dst_dtype), n);
        return;
    }
    uint32_t tile[TILE];
    for (uint32_t i = 0; i < n; i += TILE) {
        uint32_t m = n - i < TILE ? n - i : TILE;
        widen(tile, src + i * src_stride, src_dtype, src_stride, m);
        narrow(dst + i * dst_stride, dst_dtype, dst_stride, tile, m);
    }
}

/* All ones in the exponent. A tile at a time without an exit inside, so that it becomes vectors. */
static bool tile_finite(const uint8_t *data, uint32_t dtype, size_t n)
{
    uint32_t found = 0;
    if (dtype == BATON_F32) {
        for (size_t i = 0; i < n; i++) {
            uint32_t x;
            memcpy(&x, data + 4 * i, sizeof x);
            found |= (x & 0x7f800000u) == 0x7f800000u;
        }
        return !found;
    }
    const uint16_t ones = dtype == BATON_F16 ? 0x7c00u : 0x7f80u;
    for (size_t i = 0; i < n; i++) {
        uint16_t x;
        memcpy(&x, data + 2 * i, sizeof x);
        found |= (x & ones) == ones;
    }
    return !found;
}

size_t kv_first_not_finite(const uint8_t *data, uint32_t dtype, size_t n)
{
    size_t width = kv_dtype_bytes(dtype);
    for (size_t at = 0; at < n; at += TILE) {
        size_t m = n - at < TILE ? n - at : TILE;
        if (tile_finite(data + at * width, dtype, m))
            continue;
        while (tile_finite(data + at * width, dtype, 1))
            at++;
        return at;
    }
    return n;
}
