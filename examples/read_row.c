/* read_row.c: print one row of a checkpoint's n-gram table.
 *
 *   cc read_row.c $(pkg-config --cflags --libs libqx) -o read_row
 *   ./read_row CHECKPOINT ROW
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include <qx.h>

static int fails(const struct qx_error *err) {
    fprintf(stderr, "read_row: %s: %s\n", err->kind, err->msg);
    return EXIT_FAILURE;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: read_row CHECKPOINT ROW\n");
        return EXIT_FAILURE;
    }
    const uint64_t row = strtoull(argv[2], NULL, 10);
    struct qx_error err;
    struct qx_ckpt *ck;
    struct qx_rows *rows = NULL;
    float *values = NULL;
    int status = EXIT_FAILURE;

    if (qx_ckpt_open(&ck, argv[1], NULL, &err) != 0) {
        return fails(&err);
    }
    if (qx_rows_open_table(&rows, ck, &err) != 0) {
        status = fails(&err);
        goto out;
    }
    const size_t width = (size_t)qx_rows_width(rows);
    values = malloc(width * sizeof *values);
    if (values == NULL) {
        perror("read_row");
        goto out;
    }
    if (qx_rows_read(rows, &row, 1, QX_ROW_F32, values, &err) != 0) {
        status = fails(&err);
        goto out;
    }
    printf("row %" PRIu64 " of %" PRIu64 ", %s:", row, qx_rows_count(rows),
           qx_format_name(qx_rows_format(rows)));
    for (size_t i = 0; i < width; i++) {
        printf(" %.9g", (double)values[i]);
    }
    putchar('\n');
    status = EXIT_SUCCESS;
out:
    free(values);
    qx_rows_close(rows);
    qx_ckpt_close(ck);
    return status;
}
