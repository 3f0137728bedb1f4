/* decoder_proc.h: an external decoder as a child process: `CMD PATH TENSOR` gets row numbers on stdin,
 * one a line, and answers one line per row: the number, then the row as bfloat16 bit patterns, four hex
 * digits each, separated by spaces. */
#ifndef QX_DECODER_PROC_H
#define QX_DECODER_PROC_H

#include "base.h"
#include "error.h"

/* Runs cmd (by /bin/sh) for one tensor. out [n, width] gets the answers in the order of rows. Returns 0,
 * or 1 with the reason in `why` when the program did not do its part: stopped early, an answer that is no
 * answer, none within timeout_ms, exit status not 0. Negative with err when the question could not be put:
 * QX_E_USAGE when there is no such program, memory, no process. The child and its descendants are gone on return. */
int qx_decoder_proc(const char *cmd, const char *path, const char *tensor, const uint64_t *rows, size_t n,
                    uint64_t width, uint32_t timeout_ms, uint16_t *out, char why[256],
                    struct qx_error *err);

#endif
