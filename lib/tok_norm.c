/* tok_norm.c: NFC. Decomposition and composition pairs come from utf8proc; the canonical ordering of
 * marks is done here, because utf8proc's is quadratic in a long run of them. */
#include "tok.h"

#include "alloc.h"
#include "utf8.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

struct mark { int32_t cp; int32_t ccc; uint32_t at; };

static int by_class(const void *a, const void *b)
{
    const struct mark *x = a, *y = b;
    if (x->ccc != y->ccc) {
        return x->ccc < y->ccc ? -1 : 1;
    }
    return x->at < y->at ? -1 : 1;
}

static int32_t ccc_of(int32_t cp)
{
    return cp < 0x300 ? 0 : utf8proc_get_property(cp)->combining_class;
}

/* Sorts each run of marks stably by combining class. `work` has room for n. */
static void reorder(int32_t *cp, size_t n, struct mark *work)
{
    for (size_t i = 0; i < n;) {
        size_t m = 0;
        bool sorted = true;
        for (; i + m < n; m++) {
            int32_t k = ccc_of(cp[i + m]);
            if (k == 0) {
                break;
            }
            work[m] = (struct mark){cp[i + m], k, (uint32_t)m};
            sorted = sorted && (m == 0 || work[m - 1].ccc <= k);
        }
        if (!sorted) {
            qsort(work, m, sizeof *work, by_class);
            for (size_t j = 0; j < m; j++) {
                cp[i + j] = work[j].cp;
            }
        }
        i += m + 1;
    }
}

int qx_nfc(const char *p, size_t n, struct qx_buf *out, struct qx_error *err)
{
    const utf8proc_option_t how = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
    int32_t *cp = NULL;
    struct mark *work = NULL;
    size_t cap = 0, m = 0;
    void *grown;
    int rc = 0;
    bool ascii = true;
    for (size_t i = 0; i < n && ascii; i++) {
        ascii = (uint8_t)p[i] < 0x80;
    }
    if (ascii) {
        qx_buf_add(out, p, n);
        return out->failed ? qx_fail_nomem(err) : 0;
    }
    for (size_t i = 0; i < n;) {
        uint32_t c;
        int len = qx_utf8_decode(p + i, n - i, &c);
        if (len <= 0) {
            rc = qx_fail(err, QX_E_VALUE, "text-utf8", "text is not UTF-8 at byte %zu", i);
            goto out;
        }
        /* No character decomposes into more than 18 others (4 canonically). */
        grown = cp;
        if (!qx_grow(&grown, &cap, m + 32, sizeof *cp)) {
            rc = qx_fail_nomem(err);
            goto out;
        }
        cp = grown;
        utf8proc_ssize_t k = utf8proc_decompose_char((utf8proc_int32_t)c, cp + m, 32, how, NULL);
        if (k < 0 || k > 32) {
            rc = qx_fail(err, QX_E_VALUE, "text-utf8", "character U+%04X at byte %zu has no NFC form", c,
                         i);
            goto out;
        }
        m += (size_t)k;
        i += (size_t)len;
    }
    if (m > 0) {
        work = m <= SIZE_MAX / sizeof *work ? qx_malloc(m * sizeof *work) : NULL;
        if (!work) {
            rc = qx_fail_nomem(err);
            goto out;
        }
        reorder(cp, m, work);
        utf8proc_ssize_t k = utf8proc_normalize_utf32(cp, (utf8proc_ssize_t)m, how);
        for (utf8proc_ssize_t i = 0; i < k; i++) {
            char b[4];
            qx_buf_add(out, b, qx_utf8_encode((uint32_t)cp[i], b));
        }
    }
    if (out->failed) {
        rc = qx_fail_nomem(err);
    }
out:
    qx_free(work);
    qx_free(cp);
    return rc;
}
