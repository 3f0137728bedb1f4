/* config_check.h: findings about a configuration that could be read: settings that do not go
 * together (warnings), and unusual ones (notes). */
#ifndef QX_CONFIG_CHECK_H
#define QX_CONFIG_CHECK_H

#include "config.h"
#include "json_doc.h"

/* top: the whole document; text: its text_config (top itself for a text-only export). */
void qx_config_check(const struct qx_config *c, const struct qx_json *top,
                     const struct qx_json *text, const char *file, struct qx_findings *fs);

#endif
