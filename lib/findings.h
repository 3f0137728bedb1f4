/* findings.h: filling a list of findings. Equal findings (same kind, severity, group key) over many
 * tensors become one with a count and a few examples. */
#ifndef QX_FINDINGS_H
#define QX_FINDINGS_H

#include "base.h"
#include "qx.h"

#define QX_MAX_EXAMPLES 5

struct qx_findings *qx_findings_create(void);
void qx_findings_destroy(struct qx_findings *fs);

/* What to report; strings are copied, NULL where absent. `text` is never absent: NULL is a buffer that found no
 * memory, and counts as that. `group` NULL: never merged. Otherwise findings
 * with equal kind, severity and group are merged: the first gives file, tensor, key, expected, found,
 * off and text; each adds 1 (or `count` when not 0) to count, and its tensor (or key, or file) to the
 * examples. */
struct qx_report {
    const char *kind;
    enum qx_severity severity;
    const char *file, *tensor, *key;
    uint64_t off; /* QX_NO_OFF if none; note that 0 is a valid offset: use QX_REPORT() */
    const char *expected, *found, *text;
    const char *group;
    uint64_t count;
};
#define QX_REPORT(kind_, severity_, ...) \
    ((struct qx_report){.kind = (kind_), .severity = (severity_), .off = QX_NO_OFF, __VA_ARGS__})

/* Returns false when out of memory (the list stays valid and remembers it: see qx_findings_failed). */
bool qx_findings_add(struct qx_findings *fs, const struct qx_report *r);
/* Appends copies of all of b, groups merged. */
bool qx_findings_append(struct qx_findings *fs, const struct qx_findings *b);
/* Stable order for output: severity (errors first), kind, file, tensor, key, then order of arrival. */
void qx_findings_sort(struct qx_findings *fs);
bool qx_findings_failed(const struct qx_findings *fs);
/* Replaces the text of finding i (after grouping, once counts are known). */
bool qx_findings_set_text(struct qx_findings *fs, size_t i, const char *text);

#endif
