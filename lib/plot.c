/* plot.c: keeps nothing. All output goes to the caller's buffer; numbers are written with %g in the
 * C locale's way (callers do not set another). */
#include "plot.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const blocks[9] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
static const char ascii_blocks[10] = " .:-=+*#@";

static uint64_t largest(const uint64_t *v, size_t n)
{
    uint64_t m = 0;
    for (size_t i = 0; i < n; i++) {
        m = v[i] > m ? v[i] : m;
    }
    return m;
}

void qx_plot_spark(struct qx_buf *b, const uint64_t *v, size_t n, bool ascii)
{
    uint64_t max = largest(v, n);
    for (size_t i = 0; i < n; i++) {
        size_t h = 0;
        if (v[i] && max) {
            h = (size_t)((double)v[i] / (double)max * 8.0 + 0.5);
            h = h < 1 ? 1 : h > 8 ? 8 : h;
        }
        if (ascii) {
            qx_buf_chr(b, ascii_blocks[h]);
        } else {
            qx_buf_str(b, blocks[h]);
        }
    }
}

void qx_plot_bars(struct qx_buf *b, const uint64_t *v, size_t n, double lo, double hi,
                  size_t n_lines, unsigned width_cols, bool ascii)
{
    uint64_t sum[64] = {0};
    n_lines = n_lines < 1 ? 1 : n_lines > QX_ARRAY_LEN(sum) ? QX_ARRAY_LEN(sum) : n_lines;
    n_lines = n_lines > n ? n : n_lines;
    for (size_t i = 0; i < n; i++) {
        sum[i * n_lines / n] += v[i];
    }
    uint64_t max = largest(sum, n_lines);
    double step = n_lines ? (hi - lo) / (double)n_lines : 0;
    for (size_t i = 0; i < n_lines; i++) {
        double w = max ? (double)sum[i] / (double)max * width_cols : 0;
        size_t cells = (size_t)(w + 0.5);
        cells = sum[i] && cells == 0 ? 1 : cells;
        qx_buf_fmt(b, "%12.5g  %12" PRIu64 "%s", lo + step * (double)i, sum[i], cells ? "  " : "");
        for (size_t k = 0; k < cells; k++) {
            qx_buf_str(b, ascii ? "#" : "█");
        }
        qx_buf_chr(b, '\n');
    }
}

/* ---- SVG ------------------------------------------------------------------------------------- */

enum { CHART_W = 720, CHART_H = 240, LEFT = 70, RIGHT = 20, TOP = 34, BOTTOM = 44 };

static const char *const colors[] = {"#1b6ca8", "#c44536", "#3a7d44",
                                     "#8e5ea2", "#b8860b", "#444444"};

static void xml(struct qx_buf *b, const char *s)
{
    struct qx_buf shown = {0};
    qx_buf_escaped(&shown, s, strlen(s));
    for (size_t i = 0; i < shown.n; i++) {
        char c = shown.p[i];
        const char *e = c == '&'   ? "&amp;"
                        : c == '<' ? "&lt;"
                        : c == '>' ? "&gt;"
                        : c == '"' ? "&quot;"
                                   : NULL;
        if (e) {
            qx_buf_str(b, e);
        } else {
            qx_buf_chr(b, c);
        }
    }
    b->failed = b->failed || shown.failed;
    qx_buf_fini(&shown);
}

static void text(struct qx_buf *b, double x, double y, const char *anchor, int size, const char *s)
{
    qx_buf_fmt(b, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-size=\"%d\">", x, y, anchor,
               size);
    xml(b, s);
    qx_buf_str(b, "</text>\n");
}

void qx_svg_begin(struct qx_svg *s, const char *title, uint32_t n_charts)
{
    memset(s, 0, sizeof *s);
    uint64_t height = 40 + (uint64_t)n_charts * CHART_H;
    qx_buf_fmt(&s->buf,
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%" PRIu64
               "\" viewBox=\"0 0 %d %" PRIu64 "\" font-family=\"sans-serif\">\n"
               "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
               CHART_W, height, CHART_W, height);
    text(&s->buf, CHART_W / 2.0, 24, "middle", 16, title);
}

static double chart_top(const struct qx_svg *s)
{
    return 40.0 + (double)s->n_charts * CHART_H;
}

static void axes(struct qx_svg *s, const char *title, double x0, double x1, double y1, bool log_x)
{
    struct qx_buf *b = &s->buf;
    double top = chart_top(s);
    double bottom = top + CHART_H - BOTTOM;
    char label[40];
    text(b, LEFT, top + 16, "start", 12, title);
    qx_buf_fmt(b, "<path d=\"M%d %.1f V%.1f H%d\" fill=\"none\" stroke=\"#888\"/>\n", LEFT,
               top + TOP, bottom, CHART_W - RIGHT);
    for (int i = 0; i <= 4; i++) {
        double f = i / 4.0;
        double v = log_x ? x0 * pow(x1 / x0, f) : x0 + (x1 - x0) * f;
        snprintf(label, sizeof label, "%.4g", v);
        text(b, LEFT + f * (CHART_W - LEFT - RIGHT), bottom + 16, "middle", 10, label);
        snprintf(label, sizeof label, "%.4g", y1 * f);
        text(b, LEFT - 6, bottom - f * (CHART_H - TOP - BOTTOM) + 3, "end", 10, label);
    }
}

void qx_svg_bars(struct qx_svg *s, const char *title, const uint64_t *v, size_t n, double lo,
                 double hi)
{
    double top = chart_top(s);
    double bottom = top + CHART_H - BOTTOM;
    uint64_t max = largest(v, n);
    axes(s, title, lo, hi, (double)max, false);
    double w = (CHART_W - LEFT - RIGHT) / (double)(n ? n : 1);
    for (size_t i = 0; i < n && max; i++) {
        double h = (double)v[i] / (double)max * (CHART_H - TOP - BOTTOM);
        qx_buf_fmt(&s->buf,
                   "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"/>\n",
                   LEFT + w * (double)i, bottom - h, w * 0.92, h, colors[0]);
    }
    s->n_charts++;
}

void qx_svg_lines(struct qx_svg *s, const char *title, const char *x_label, const char *y_label,
                  const char *const *names, const double *x, const double *y, size_t n_series,
                  size_t n_points, bool log_x)
{
    double x0 = INFINITY;
    double x1 = -INFINITY;
    double y1 = 0;
    for (size_t i = 0; i < n_series * n_points; i++) {
        if (isfinite(x[i]) && isfinite(y[i]) && (!log_x || x[i] > 0)) {
            x0 = fmin(x0, x[i]);
            x1 = fmax(x1, x[i]);
            y1 = fmax(y1, y[i]);
        }
    }
    if (!(x1 > x0)) {
        x0 = isfinite(x0) ? x0 : 1;
        x1 = log_x ? x0 * 2 : x0 + 1;
    }
    y1 = y1 > 0 ? y1 * 1.05 : 1;
    double top = chart_top(s);
    double bottom = top + CHART_H - BOTTOM;
    axes(s, title, x0, x1, y1, log_x);
    text(&s->buf, (CHART_W + LEFT) / 2.0, bottom + 32, "middle", 11, x_label);
    text(&s->buf, CHART_W - RIGHT, top + 16, "end", 11, y_label);
    for (size_t k = 0; k < n_series; k++) {
        const char *color = colors[k % QX_ARRAY_LEN(colors)];
        bool open = false;
        qx_buf_fmt(&s->buf, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"1.6\" d=\"", color);
        for (size_t i = 0; i < n_points; i++) {
            double px = x[k * n_points + i];
            double py = y[k * n_points + i];
            if (!isfinite(px) || !isfinite(py) || (log_x && px <= 0)) {
                continue;
            }
            double f = log_x ? log(px / x0) / log(x1 / x0) : (px - x0) / (x1 - x0);
            qx_buf_fmt(&s->buf, "%s%.2f %.2f", open ? " L" : "M",
                       LEFT + f * (CHART_W - LEFT - RIGHT),
                       bottom - py / y1 * (CHART_H - TOP - BOTTOM));
            open = true;
        }
        qx_buf_str(&s->buf, open ? "\"/>\n" : "M0 0\"/>\n");
        qx_buf_fmt(&s->buf, "<g fill=\"%s\">", color);
        text(&s->buf, LEFT + 8, top + TOP + 12 + 13 * (double)k, "start", 11, names[k]);
        qx_buf_str(&s->buf, "</g>\n");
    }
    s->n_charts++;
}

void qx_svg_end(struct qx_svg *s)
{
    qx_buf_str(&s->buf, "</svg>\n");
}
