/* json_out.h: a streaming JSON writer into a growing buffer, with fixed key order, correct escapes and
 * no NaN that slips through (written as the strings "NaN", "Infinity", "-Infinity"). */
#ifndef QX_JSON_OUT_H
#define QX_JSON_OUT_H

#include "base.h"
#include "str.h"

struct qx_json_out {
    struct qx_buf buf;
    uint32_t depth;
    bool indent;        /* two spaces a level; false writes one line */
    bool need_comma[64];
};
void qx_json_out_init(struct qx_json_out *o, bool indent);
void qx_json_out_fini(struct qx_json_out *o);
/* key NULL inside arrays and at the top. */
void qx_json_obj(struct qx_json_out *o, const char *key);
void qx_json_obj_end(struct qx_json_out *o);
void qx_json_arr(struct qx_json_out *o, const char *key);
void qx_json_arr_end(struct qx_json_out *o);
void qx_json_str(struct qx_json_out *o, const char *key, const char *s);           /* NULL -> null */
void qx_json_strn(struct qx_json_out *o, const char *key, const char *s, size_t n); /* must be UTF-8;
                                             invalid bytes become U+FFFD */
void qx_json_u64(struct qx_json_out *o, const char *key, uint64_t v);
void qx_json_i64(struct qx_json_out *o, const char *key, int64_t v);
void qx_json_f64(struct qx_json_out *o, const char *key, double v); /* shortest that reads back equal */
void qx_json_f32(struct qx_json_out *o, const char *key, float v);
void qx_json_bool(struct qx_json_out *o, const char *key, bool v);
void qx_json_null(struct qx_json_out *o, const char *key);

#endif
