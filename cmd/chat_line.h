/* chat_line.h: a line from the terminal, with editing and history where libedit is built in. */
#ifndef QX_CMD_CHAT_LINE_H
#define QX_CMD_CHAT_LINE_H

#include "base.h"
#include "str.h"

enum chat_line { CHAT_LINE_OK, CHAT_LINE_END, CHAT_LINE_INTERRUPTED };

struct chat_input;
/* NULL when out of memory. `plain` does without editing. */
struct chat_input *chat_input_open(bool plain);
void chat_input_close(struct chat_input *in);
/* Reads a line (without its newline) behind `prompt`. */
enum chat_line chat_input_line(struct chat_input *in, const char *prompt, struct qx_buf *out);

#endif
