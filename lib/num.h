/* num.h: strict parsing of numbers, ranges and sizes, and sizes and rates as text. */
#ifndef QX_NUM_H
#define QX_NUM_H

#include "base.h"
#include "error.h"
#include "str.h"

/* Decimal digits only, whole string, no sign, no overflow. */
bool qx_parse_u64(const char *s, size_t n, uint64_t *out);
bool qx_parse_i64(const char *s, size_t n, int64_t *out);
/* A finite decimal floating number, whole string, locale-independent. */
bool qx_parse_f64(const char *s, size_t n, double *out);
/* 4096, 64K, 64KiB, 2G, 2GiB: powers of 1024. MB, GB etc. are refused with the right spelling. */
int qx_parse_size(const char *s, uint64_t *out, struct qx_error *err);

struct qx_u64_list { uint64_t *v; size_t n; };
void qx_u64_list_fini(struct qx_u64_list *l);
/* LIST: "7", "3-9" (both ends in), several with commas. Order and repeats are kept. A bad number is
 * QX_E_USAGE ("usage"), an item that is no plain count (negative) QX_E_RANGE with kind `range_kind`. */
int qx_parse_list(const char *s, const char *range_kind, struct qx_u64_list *out, struct qx_error *err);
/* Numbers separated by white space or commas, as in @FILE and stdin. */
int qx_parse_list_text(const char *s, size_t n, const char *range_kind, struct qx_u64_list *out,
                       struct qx_error *err);

/* "12.34 GiB", "512 B": two decimals from KiB up. */
const char *qx_size_text(uint64_t bytes, char out[32]);
/* 1234567 -> "1,234,567" */
const char *qx_count_text(uint64_t n, char out[32]);

#endif
