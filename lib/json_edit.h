/* json_edit.h: changing single members of a JSON text and leaving every other byte as it is. */
#ifndef QX_JSON_EDIT_H
#define QX_JSON_EDIT_H

#include "base.h"
#include "error.h"
#include "str.h"

/* A path is keys joined by '/', such as "text_config/split_ngram_parts". */
/* Value of a member as text, false when it is absent. */
bool qx_json_edit_find(const struct qx_buf *text, const char *path, struct qx_view *value);
/* Replaces the member's value, or adds the member at the end of its object (which must exist) with the
 * indentation of its neighbours. `value` is JSON. False when the object is absent or memory ran out. */
bool qx_json_edit_set(struct qx_buf *text, const char *path, const char *value);
/* Removes the member with its comma; true also when it was absent. */
bool qx_json_edit_remove(struct qx_buf *text, const char *path);

#endif
