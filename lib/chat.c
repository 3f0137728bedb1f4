/* chat.c: prompts as the chat template of model 13 renders them. The fixed text around tools is not
 * repeated here: it is taken from the checkpoint's own template. */
#include "qx.h"

#include "alloc.h"
#include "error.h"
#include "json_pull.h"
#include "str.h"
#include "utf8.h"

#include <string.h>

static const char xhigh_text[] =
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, "
    "consider plausible alternatives, and prioritize correctness, consistency, and clarity in the final "
    "answer.";
static const char low_text[] =
    "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the "
    "conclusion without unnecessary elaboration.";

static bool is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
           c == 0x205f || c == 0x3000;
}

static struct qx_view trim(const char *s)
{
    struct qx_view v = {s ? s : "", s ? strlen(s) : 0};
    const char *last;
    uint32_t c;
    for (int len; v.n && (len = qx_utf8_decode(v.p, v.n, &c)) > 0 && is_space(c);) {
        v.p += len;
        v.n -= (size_t)len;
    }
    last = v.p;
    for (size_t i = 0; i < v.n;) {
        int len = qx_utf8_decode(v.p + i, v.n - i, &c);
        bool space = len > 0 && is_space(c);
        i += len > 0 ? (size_t)len : 1;
        if (!space) {
            last = v.p + i;
        }
    }
    v.n = (size_t)(last - v.p);
    return v;
}

static void add_view(struct qx_buf *b, struct qx_view v)
{
    qx_buf_add(b, v.p, v.n);
}

/* ---- JSON as the template's tojson writes it: ", " and ": " between, other text as it is --------- */

static void json_string(struct qx_buf *b, const char *p, size_t n)
{
    qx_buf_chr(b, '"');
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        switch (c) {
        case '"':
            qx_buf_str(b, "\\\"");
            break;
        case '\\':
            qx_buf_str(b, "\\\\");
            break;
        case '\n':
            qx_buf_str(b, "\\n");
            break;
        case '\r':
            qx_buf_str(b, "\\r");
            break;
        case '\t':
            qx_buf_str(b, "\\t");
            break;
        case '\b':
            qx_buf_str(b, "\\b");
            break;
        case '\f':
            qx_buf_str(b, "\\f");
            break;
        default:
            if (c < 0x20) {
                qx_buf_fmt(b, "\\u%04x", c);
            } else {
                qx_buf_chr(b, (char)c);
            }
        }
    }
    qx_buf_chr(b, '"');
}

/* Writes the value whose first event j stands on, and moves to its last event. */
static bool json_value(struct qx_buf *b, struct qx_json_pull *j)
{
    uint32_t depth = 0;
    bool first[QX_JSON_MAX_DEPTH + 1] = {true};
    bool after_key = false;
    do {
        enum qx_json_type t = j->type;
        if (t == QX_JSON_ERROR || t == QX_JSON_END) {
            return false;
        }
        bool closes = t == QX_JSON_OBJECT_END || t == QX_JSON_ARRAY_END;
        if (!closes && depth && !after_key) {
            qx_buf_str(b, first[depth] ? "" : ", ");
            first[depth] = false;
        }
        after_key = false;
        switch (t) {
        case QX_JSON_OBJECT:
        case QX_JSON_ARRAY:
            qx_buf_chr(b, t == QX_JSON_OBJECT ? '{' : '[');
            first[++depth] = true;
            break;
        case QX_JSON_OBJECT_END:
        case QX_JSON_ARRAY_END:
            qx_buf_chr(b, t == QX_JSON_OBJECT_END ? '}' : ']');
            depth--;
            break;
        case QX_JSON_KEY:
            json_string(b, j->text.p, j->text.n);
            qx_buf_str(b, ": ");
            after_key = true;
            break;
        case QX_JSON_STRING:
            json_string(b, j->text.p, j->text.n);
            break;
        case QX_JSON_NUMBER:
            qx_buf_add(b, j->text.p, j->text.n);
            break;
        case QX_JSON_TRUE:
            qx_buf_str(b, "true");
            break;
        case QX_JSON_FALSE:
            qx_buf_str(b, "false");
            break;
        default:
            qx_buf_str(b, "null");
        }
        if (depth) {
            qx_json_next(j);
        }
    } while (depth);
    return true;
}

static int json_object(struct qx_buf *b, const char *text, const char *what, struct qx_error *err)
{
    struct qx_json_pull j;
    qx_json_pull_init(&j, text, strlen(text));
    bool ok = qx_json_next(&j) == QX_JSON_OBJECT && json_value(b, &j) &&
              qx_json_next(&j) == QX_JSON_END;
    qx_json_pull_fini(&j);
    return ok ? 0 : qx_fail(err, QX_E_USAGE, "chat", "%s is not a JSON object", what);
}

/* <parameter=KEY>\nVALUE\n</parameter>\n for every argument; strings raw, others as JSON. */
static int arguments(struct qx_buf *b, const struct qx_tool_call *call, struct qx_error *err)
{
    struct qx_json_pull j;
    const char *text = call->arguments && call->arguments[0] ? call->arguments : "{}";
    qx_json_pull_init(&j, text, strlen(text));
    bool ok = qx_json_next(&j) == QX_JSON_OBJECT;
    while (ok && qx_json_next(&j) == QX_JSON_KEY) {
        qx_buf_str(b, "<parameter=");
        add_view(b, j.text);
        qx_buf_str(b, ">\n");
        qx_json_next(&j);
        if (j.type == QX_JSON_STRING) {
            add_view(b, j.text);
        } else {
            ok = json_value(b, &j);
        }
        qx_buf_str(b, "\n</parameter>\n");
    }
    ok = ok && j.type == QX_JSON_OBJECT_END && qx_json_next(&j) == QX_JSON_END;
    qx_json_pull_fini(&j);
    return ok ? 0
              : qx_fail(err, QX_E_USAGE, "chat", "arguments of the call of '%s' are not a JSON object",
                        call->name);
}

/* ---- the template's fixed text about tools -------------------------------------------------------- */

/* A string literal of the template language at p (on its quote); appends its text, returns its end. */
static const char *literal(const char *p, struct qx_buf *b)
{
    char quote = *p++;
    while (*p && *p != quote) {
        if (*p == '\\' && p[1]) {
            p++;
            qx_buf_chr(b, *p == 'n' ? '\n' : *p == 't' ? '\t' : *p == 'r' ? '\r' : *p);
        } else {
            qx_buf_chr(b, *p);
        }
        p++;
    }
    return *p ? p + 1 : p;
}

/* head: from "# Tools" to "<tools>"; tail: "\n</tools>" and the call format that follows it. */
static bool tool_texts(const char *text, struct qx_buf *head, struct qx_buf *tail)
{
    int tail_parts = 0;
    bool inside = false;
    for (const char *p = text; *p;) {
        if (p[0] == '{' && (p[1] == '{' || p[1] == '%')) {
            inside = true;
            p += 2;
            continue;
        }
        if ((p[0] == '}' || p[0] == '%') && p[1] == '}') {
            inside = false;
            p += 2;
            continue;
        }
        if (!inside || (*p != '"' && *p != '\'')) {
            p++;
            continue;
        }
        struct qx_buf lit = {0};
        p = literal(p, &lit);
        const char *s = qx_buf_cstr(&lit);
        if (s && !head->n && qx_str_starts(s, "# Tools") && strstr(s, "<tools>")) {
            qx_buf_str(head, s);
        } else if (s && head->n && tail_parts == 0 && strstr(s, "</tools>")) {
            qx_buf_str(tail, s);
            tail_parts = qx_str_ends(s, "</tools>") ? 1 : 2;
        } else if (s && tail_parts == 1) {
            qx_buf_str(tail, s);
            tail_parts = 2;
        }
        qx_buf_fini(&lit);
    }
    return head->n && tail_parts == 2 && !head->failed && !tail->failed;
}

static int tool_preamble(struct qx_buf *b, const struct qx_chat_opts *o, struct qx_error *err)
{
    struct qx_buf head = {0}, tail = {0};
    int rc = 0;
    if (!o->template_text || !tool_texts(o->template_text, &head, &tail)) {
        rc = qx_fail(err, QX_E_UNSUPPORTED, "chat-tools",
                     "tools need the fixed texts of the checkpoint's own chat template, which %s",
                     o->template_text ? "does not have them" : "is not there");
    }
    qx_buf_add(b, head.p, head.n);
    for (size_t i = 0; rc == 0 && i < o->n_tools; i++) {
        qx_buf_chr(b, '\n');
        rc = json_object(b, o->tools[i], "a tool", err);
    }
    qx_buf_add(b, tail.p, tail.n);
    qx_buf_fini(&head);
    qx_buf_fini(&tail);
    return rc;
}

/* ---- messages --------------------------------------------------------------------------------------- */

static bool role_is(const struct qx_message *m, const char *role)
{
    return m->role && !strcmp(m->role, role);
}

static bool is_tool_response(const struct qx_message *m)
{
    struct qx_view v = trim(m->content);
    static const char open[] = "<tool_response>", close[] = "</tool_response>";
    return v.n >= sizeof open - 1 + sizeof close - 1 && !memcmp(v.p, open, sizeof open - 1) &&
           !memcmp(v.p + v.n - (sizeof close - 1), close, sizeof close - 1);
}

static int assistant(struct qx_buf *b, const struct qx_message *m, bool with_thinking,
                     struct qx_error *err)
{
    struct qx_view text = trim(m->content);
    qx_buf_str(b, "<|im_start|>assistant\n");
    if (with_thinking) {
        qx_buf_str(b, "<think>\n");
        add_view(b, trim(m->reasoning));
        qx_buf_str(b, "\n</think>\n\n");
    }
    add_view(b, text);
    for (size_t i = 0; i < m->n_calls; i++) {
        if (!m->calls[i].name) {
            return qx_fail(err, QX_E_USAGE, "chat", "a tool call has no name");
        }
        qx_buf_str(b, i > 0 ? "\n" : text.n ? "\n\n" : "");
        qx_buf_fmt(b, "<tool_call>\n<function=%s>\n", m->calls[i].name);
        int rc = arguments(b, &m->calls[i], err);
        if (rc) {
            return rc;
        }
        qx_buf_str(b, "</function>\n</tool_call>");
    }
    qx_buf_str(b, "<|im_end|>\n");
    return 0;
}

static int render(struct qx_buf *b, const struct qx_message *msgs, size_t n, const struct qx_chat_opts *o,
                  struct qx_error *err)
{
    const char *effort = o->effort ? o->effort : "xhigh", *instruction = "";
    size_t first = 0, last_query = SIZE_MAX;
    struct qx_view system = {"", 0};
    if (strcmp(effort, "xhigh") != 0 && strcmp(effort, "medium") != 0 && strcmp(effort, "low") != 0) {
        return qx_fail(err, QX_E_USAGE, "chat", "reasoning effort '%.40s' is not xhigh, medium or low",
                       effort);
    }
    if (n == 0) {
        return qx_fail(err, QX_E_USAGE, "chat", "there are no messages");
    }
    if (!o->no_thinking) {
        instruction = !strcmp(effort, "xhigh") ? xhigh_text : !strcmp(effort, "low") ? low_text : "";
    }
    for (size_t i = 0; i < n; i++) {
        if (role_is(&msgs[i], "system")) {
            if (i > 0) {
                return qx_fail(err, QX_E_USAGE, "chat", "message %zu is a system message, which must be "
                               "the first", i);
            }
        } else if (role_is(&msgs[i], "user")) {
            last_query = is_tool_response(&msgs[i]) ? last_query : i;
        } else if (!role_is(&msgs[i], "assistant") && !role_is(&msgs[i], "tool")) {
            return qx_fail(err, QX_E_USAGE, "chat",
                           "message %zu has the role '%.40s', known are system, user, assistant and tool",
                           i, msgs[i].role ? msgs[i].role : "");
        }
    }
    if (last_query == SIZE_MAX) {
        return qx_fail(err, QX_E_USAGE, "chat", "there is no user message");
    }
    if (role_is(&msgs[0], "system")) {
        system = trim(msgs[0].content);
        first = 1;
    }
    if (o->n_tools || system.n || instruction[0]) {
        qx_buf_str(b, "<|im_start|>system\n");
        qx_buf_str(b, instruction);
        if (o->n_tools) {
            qx_buf_str(b, instruction[0] ? "\n\n" : "");
            int rc = tool_preamble(b, o, err);
            if (rc) {
                return rc;
            }
            qx_buf_str(b, system.n ? "\n\n" : "");
        } else {
            qx_buf_str(b, instruction[0] && system.n ? "\n\n" : "");
        }
        add_view(b, system);
        qx_buf_str(b, "<|im_end|>\n");
    }
    for (size_t i = first; i < n; i++) {
        const struct qx_message *m = &msgs[i];
        if (role_is(m, "user")) {
            qx_buf_str(b, "<|im_start|>user\n");
            add_view(b, trim(m->content));
            qx_buf_str(b, "<|im_end|>\n");
        } else if (role_is(m, "assistant")) {
            int rc = assistant(b, m, !o->forget_thinking || i > last_query, err);
            if (rc) {
                return rc;
            }
        } else { /* tool: consecutive ones share one user turn */
            if (i == first || !role_is(&msgs[i - 1], "tool")) {
                qx_buf_str(b, "<|im_start|>user");
            }
            qx_buf_str(b, "\n<tool_response>\n");
            add_view(b, trim(m->content));
            qx_buf_str(b, "\n</tool_response>");
            if (i + 1 == n || !role_is(&msgs[i + 1], "tool")) {
                qx_buf_str(b, "<|im_end|>\n");
            }
        }
    }
    if (!o->no_generation_prompt) {
        qx_buf_str(b, o->no_thinking ? "<|im_start|>assistant\n<think>\n\n</think>\n\n"
                                     : "<|im_start|>assistant\n<think>\n");
    }
    return 0;
}

int qx_chat_render(const struct qx_message *msgs, size_t n_msgs, const struct qx_chat_opts *opts,
                   char **out, size_t *n, struct qx_error *err)
{
    struct qx_buf b = {0};
    *out = NULL;
    *n = 0;
    int rc = render(&b, msgs, n_msgs, opts, err);
    if (rc == 0 && !qx_buf_cstr(&b)) {
        rc = qx_fail_nomem(err);
    }
    if (rc) {
        qx_buf_fini(&b);
        return rc;
    }
    *out = b.p;
    *n = b.n;
    return 0;
}

void qx_text_free(char *text)
{
    qx_free(text);
}
