/* SPDX-License-Identifier: Apache-2.0 */
/* What should not be shown to others: absolute paths of a machine, user names, addresses and names
 * of hosts, keys. Found by patterns, so what looks like none is not found.
 *
 *     audit_search_open(&search, &e);
 *     audit_search_known(search, path, &e);        // findings that are no news
 *     audit_search_text(search, name, text, n, 1);         // as often as wanted
 *     audit_search_folder(search, folder, &e);
 *     doc = audit_search_report(search);
 *     audit_search_close(search);
 *
 * Threads: one at a time.
 */
#ifndef AUDIT_SENSITIVE_H
#define AUDIT_SENSITIVE_H

#include "audit/audit.h"

struct audit_search;
/* Kinds of findings are path, user, host, key, and name: this user's and this host's own. A name
 * that says nothing ("root", "localhost") or has fewer than four letters is not looked for. */
int audit_search_open(struct audit_search **out, struct baton_error *e);
void audit_search_close(struct audit_search *s); /* NULL is fine */

/* A file of known findings: `KIND<tab>FILE<tab>TEXT` a line, FILE and TEXT patterns of the shell
 * ('*' matches '/' too); lines that are empty or begin with '#' are for readers. */
int audit_search_known(struct audit_search *s, const char *path, struct baton_error *e);

/* Search text that begins in line `line` of a file that is to be called `name`. What holds a NUL is
 * no text: it is counted and not looked at. What can't be searched is in the report. */
void audit_search_text(struct audit_search *s, const char *name, const char *text, size_t n,
                       uint32_t line);
/* All of a file, called `name`. A link is searched as the text that it holds. */
void audit_search_file(struct audit_search *s, const char *path, const char *name);
/* All files of an evidence folder. */
int audit_search_folder(struct audit_search *s, const char *path, struct baton_error *e);

/* {"findings": [{"file", "line", "kind", "text", "known"}], "unsearched": [{"file", "why"}],
 * "files", "binary", "new", "known", "unused"}: `unsearched` are files that could not be read or
 * that a pattern gave up on, `unused` lines of the known file that no finding matched. Of a key
 * only the beginning is in `text`. At most 10000 findings are listed, all are counted. NULL without
 * memory. */
struct json_t *audit_search_report(const struct audit_search *s);
/* All was searched, and no finding is new. */
bool audit_search_clean(const struct audit_search *s);

#endif
