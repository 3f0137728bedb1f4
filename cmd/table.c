/* table.c: owns the text of its cells until fini. */
#include "table.h"

#include "alloc.h"
#include "utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MAX_COLS 24

void table_init(struct table *t, const struct table_col *cols, size_t n_cols)
{
    memset(t, 0, sizeof *t);
    t->cols = cols;
    t->n_cols = n_cols < MAX_COLS ? n_cols : MAX_COLS;
}

void table_fini(struct table *t)
{
    for (size_t i = 0; i < t->n_cells; i++) {
        qx_free(t->cells[i]);
    }
    qx_free(t->cells);
    memset(t, 0, sizeof *t);
}

void table_cell(struct table *t, const char *fmt, ...)
{
    char text[1024];
    struct qx_buf b = {0};
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    qx_buf_escaped(&b, text, strlen(text));
    const char *s = qx_buf_cstr(&b);
    void *cells = t->cells;
    char *copy = s ? qx_strdup(s) : NULL;
    qx_buf_fini(&b);
    if (!copy || !qx_grow(&cells, &t->cap, t->n_cells + 1, sizeof *t->cells)) {
        qx_free(copy);
        t->failed = true;
        return;
    }
    t->cells = cells;
    t->cells[t->n_cells++] = copy;
}

/* Bytes of s that fit in `cols` columns. */
static size_t fit(const char *s, size_t cols)
{
    size_t n = 0, len = strlen(s);
    while (n < len) {
        uint32_t cp;
        int k = qx_utf8_decode(s + n, len - n, &cp);
        size_t step = k > 0 ? (size_t)k : 1, w = qx_utf8_width(s, n + step);
        if (w > cols) {
            break;
        }
        n += step;
    }
    return n;
}

static void put_row(struct qx_buf *b, const struct table *t, const char *const *cell,
                    const size_t *width, unsigned indent)
{
    size_t start = b->n;
    qx_buf_fmt(b, "%*s", (int)indent, "");
    for (size_t c = 0; c < t->n_cols; c++) {
        size_t w = qx_utf8_width(cell[c], strlen(cell[c])), n = strlen(cell[c]);
        bool cut = w > width[c];
        if (cut) {
            n = fit(cell[c], width[c] - 1);
            w = qx_utf8_width(cell[c], n) + 1;
        }
        size_t pad = width[c] > w ? width[c] - w : 0;
        if (c) {
            qx_buf_str(b, "  ");
        }
        if (t->cols[c].right) {
            qx_buf_fmt(b, "%*s", (int)pad, "");
        }
        qx_buf_add(b, cell[c], n);
        if (cut) {
            qx_buf_str(b, "\xe2\x80\xa6");
        }
        if (!t->cols[c].right) {
            qx_buf_fmt(b, "%*s", (int)pad, "");
        }
    }
    while (b->n > start && b->p[b->n - 1] == ' ') {
        b->n--;
    }
    qx_buf_chr(b, '\n');
}

void table_print(const struct table *t, const struct ui *ui, unsigned indent)
{
    size_t width[MAX_COLS] = {0}, total = indent;
    const char *head[MAX_COLS] = {0};
    bool titles = false;
    struct qx_buf b = {0};
    for (size_t c = 0; c < t->n_cols; c++) {
        head[c] = t->cols[c].title ? t->cols[c].title : "";
        width[c] = strlen(head[c]);
        titles = titles || head[c][0];
    }
    size_t n_rows = t->n_cols ? t->n_cells / t->n_cols : 0;
    for (size_t i = 0; i < n_rows * t->n_cols; i++) {
        size_t w = qx_utf8_width(t->cells[i], strlen(t->cells[i])), c = i % t->n_cols;
        width[c] = w > width[c] ? w : width[c];
    }
    for (size_t c = 0; c < t->n_cols; c++) {
        total += width[c] + (c ? 2 : 0);
    }
    while (ui->width_cols && total > ui->width_cols) {
        size_t best = MAX_COLS;
        for (size_t c = 0; c < t->n_cols; c++) {
            if (t->cols[c].flex && width[c] > 12 && (best == MAX_COLS || width[c] > width[best])) {
                best = c;
            }
        }
        if (best == MAX_COLS) {
            break;
        }
        size_t over = total - ui->width_cols, can = width[best] - 12, by = over < can ? over : can;
        width[best] -= by;
        total -= by;
    }
    if (titles) {
        qx_buf_str(&b, ui_style(ui->color_out, UI_BOLD));
        put_row(&b, t, head, width, indent);
        qx_buf_str(&b, ui_style(ui->color_out, UI_PLAIN));
    }
    for (size_t r = 0; r < n_rows; r++) {
        put_row(&b, t, (const char *const *)t->cells + r * t->n_cols, width, indent);
    }
    ui_out(b.p ? b.p : "", b.n);
    qx_buf_fini(&b);
}
