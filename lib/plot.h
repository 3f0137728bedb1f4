/* plot.h: numbers as pictures: a sparkline and a histogram in text, and the same data as SVG. */
#ifndef QX_PLOT_H
#define QX_PLOT_H

#include "base.h"
#include "str.h"

/* One character a value, eight heights, scaled to the largest; zero is a blank, anything more at
 * least the lowest block. ascii: " .:-=+*#" instead of block characters. */
void qx_plot_spark(struct qx_buf *b, const uint64_t *v, size_t n, bool ascii);
/* n_lines lines: the bins joined into n_lines groups, with their range, count and a bar of at most
 * width_cols. lo and hi are the range of all bins. */
void qx_plot_bars(struct qx_buf *b, const uint64_t *v, size_t n, double lo, double hi,
                  size_t n_lines, unsigned width_cols, bool ascii);

/* An SVG document of charts below one another. Texts are escaped for XML. */
struct qx_svg {
    struct qx_buf buf;
    uint32_t n_charts;
};
void qx_svg_begin(struct qx_svg *s, const char *title, uint32_t n_charts);
void qx_svg_bars(struct qx_svg *s, const char *title, const uint64_t *v, size_t n, double lo,
                 double hi);
/* Lines over a common axis; x and y: [n_series][n_points]. NaN points are left out. */
void qx_svg_lines(struct qx_svg *s, const char *title, const char *x_label, const char *y_label,
                  const char *const *names, const double *x, const double *y, size_t n_series,
                  size_t n_points, bool log_x);
void qx_svg_end(struct qx_svg *s); /* the document is s->buf; qx_buf_fini frees it */

#endif
