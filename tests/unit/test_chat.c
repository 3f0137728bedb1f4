/* Chat rendering against model 13, and the way from token bytes to shown text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "qx.h"
#include "text_stream.h"
#include "utf8.h"

#define XHIGH                                                                                       \
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key "     \
    "assumptions, consider plausible alternatives, and prioritize correctness, consistency, and "  \
    "clarity in the final answer."
#define LOW                                                                                         \
    "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the " \
    "conclusion without unnecessary elaboration."

static const struct qx_tool_call call_one[] = {
    {"get", "{\"city\": \"Rome\\nItaly\", \"days\": 3, \"opts\": {\"a\":[1,true,null]}}"}};
static const struct qx_tool_call call_two[] = {{"a", "{}"}, {"b", NULL}};

static const struct qx_message sys_user[] = {{.role = "system", .content = " You are concise.\n"},
                                             {.role = "user", .content = "Hello?"}};
static const struct qx_message user[] = {{.role = "user", .content = "Ciao"}};
static const struct qx_message empty_system[] = {{.role = "system", .content = "  "},
                                                 {.role = "user", .content = "Ciao"}};
static const struct qx_message turns[] = {{.role = "user", .content = "1"},
                                          {.role = "assistant", .content = " one ", .reasoning = "\nhm\n"},
                                          {.role = "user", .content = "2"}};
static const struct qx_message tools[] = {
    {.role = "user", .content = "w?"},
    {.role = "assistant", .content = "Let me see.", .calls = call_one, .n_calls = 1},
    {.role = "tool", .content = " sun "},
    {.role = "tool", .content = "rain"},
    {.role = "assistant", .content = "", .calls = call_two, .n_calls = 2}};
static const struct qx_message late_system[] = {{.role = "user", .content = "1"},
                                                {.role = "system", .content = "x"}};
static const struct qx_message bad_role[] = {{.role = "robot", .content = "1"}};
static const struct qx_message no_user[] = {
    {.role = "user", .content = " <tool_response>\nx\n</tool_response> "}};
static const struct qx_message bad_call[] = {
    {.role = "user", .content = "w?"},
    {.role = "assistant", .calls = (const struct qx_tool_call[]){{"x", "[1]"}}, .n_calls = 1}};

#define MSGS(m) m, QX_ARRAY_LEN(m)
static const struct {
    const char *name;
    const struct qx_message *m;
    size_t n;
    struct qx_chat_opts o;
    const char *want; /* NULL: an error */
} cases[] = {
    {"no thinking", MSGS(sys_user), {.no_thinking = true},
     "<|im_start|>system\nYou are concise.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
     "<|im_start|>assistant\n<think>\n\n</think>\n\n"},
    {"medium", MSGS(sys_user), {.effort = "medium"},
     "<|im_start|>system\nYou are concise.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
     "<|im_start|>assistant\n<think>\n"},
    {"default effort", MSGS(user), {0},
     "<|im_start|>system\n" XHIGH "<|im_end|>\n<|im_start|>user\nCiao<|im_end|>\n<|im_start|>assistant\n"
     "<think>\n"},
    {"low and system", MSGS(sys_user), {.effort = "low"},
     "<|im_start|>system\n" LOW "\n\nYou are concise.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
     "<|im_start|>assistant\n<think>\n"},
    {"empty system", MSGS(empty_system), {.no_thinking = true},
     "<|im_start|>user\nCiao<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"},
    {"effort ignored without thinking", MSGS(user), {.no_thinking = true, .effort = "low"},
     "<|im_start|>user\nCiao<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"},
    {"turns", MSGS(turns), {.effort = "medium"},
     "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\none<|im_end|>\n"
     "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n<think>\n"},
    {"turns without old thinking", MSGS(turns), {.effort = "medium", .forget_thinking = true},
     "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
     "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n<think>\n"},
    {"tool calls", MSGS(tools), {.effort = "medium", .no_generation_prompt = true},
     "<|im_start|>user\nw?<|im_end|>\n"
     "<|im_start|>assistant\n<think>\n\n</think>\n\nLet me see.\n\n<tool_call>\n<function=get>\n"
     "<parameter=city>\nRome\nItaly\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
     "<parameter=opts>\n{\"a\": [1, true, null]}\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
     "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n"
     "</tool_response><|im_end|>\n"
     "<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n<function=a>\n</function>\n</tool_call>\n"
     "<tool_call>\n<function=b>\n</function>\n</tool_call><|im_end|>\n"},
    {"no messages", NULL, 0, {0}, NULL},
    {"late system", MSGS(late_system), {0}, NULL},
    {"unknown role", MSGS(bad_role), {0}, NULL},
    {"no real user", MSGS(no_user), {0}, NULL},
    {"bad arguments", MSGS(bad_call), {0}, NULL},
    {"bad effort", MSGS(user), {.effort = "high"}, NULL},
};

static void renderings(void **state)
{
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(cases); i++) {
        char *out;
        size_t n;
        struct qx_error err = {0};
        int rc = qx_chat_render(cases[i].m, cases[i].n, &cases[i].o, &out, &n, &err);
        if (!cases[i].want) {
            assert_int_equal(rc, -(int)QX_E_USAGE);
            assert_string_equal(err.kind, "chat");
            assert_null(out);
            continue;
        }
        if (rc) {
            fail_msg("%s: %s", cases[i].name, err.msg);
        }
        if (strcmp(out, cases[i].want) != 0) {
            fail_msg("%s:\n%s\nwanted:\n%s", cases[i].name, out, cases[i].want);
        }
        assert_int_equal(n, strlen(out));
        qx_text_free(out);
    }
    assert_int_equal(qx_alloc_live(), 0);
}

static void tool_preamble(void **state)
{
    static const char template_text[] =
        "{%- if tools %}{{- '# Tools\\n\\nYou have:\\n\\n<tools>' }}{%- for tool in tools %}"
        "{{- \"\\n\" }}{{- tool | tojson }}{%- endfor %}{{- \"\\n</tools>\" }}{{- '\\n\\nCall \"so\".' }}";
    const char *const list[] = {"{\"name\":\"get\",\"n\":[1,2]}", "{ }"};
    struct qx_chat_opts o = {.tools = list, .n_tools = 2, .template_text = template_text,
                             .effort = "low"};
    char *out;
    size_t n;
    struct qx_error err = {0};
    (void)state;
    assert_int_equal(qx_chat_render(sys_user, 2, &o, &out, &n, &err), 0);
    assert_string_equal(out, "<|im_start|>system\n" LOW "\n\n# Tools\n\nYou have:\n\n<tools>\n"
                             "{\"name\": \"get\", \"n\": [1, 2]}\n{}\n</tools>\n\nCall \"so\".\n\n"
                             "You are concise.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
                             "<|im_start|>assistant\n<think>\n");
    qx_text_free(out);
    o.template_text = NULL;
    assert_int_equal(qx_chat_render(sys_user, 2, &o, &out, &n, &err), -(int)QX_E_UNSUPPORTED);
    o.template_text = "{{ '# Tools<tools>' }}";
    assert_int_equal(qx_chat_render(sys_user, 2, &o, &out, &n, &err), -(int)QX_E_UNSUPPORTED);
}

static void out_of_memory(void **state)
{
    (void)state;
    for (uint64_t i = 1; i < 200; i++) {
        char *out;
        size_t n;
        struct qx_error err = {0};
        struct qx_chat_opts o = {.effort = "medium"};
        qx_alloc_fail_at(i, true);
        int rc = qx_chat_render(tools, QX_ARRAY_LEN(tools), &o, &out, &n, &err);
        qx_alloc_fail_at(0, false);
        qx_text_free(out);
        assert_int_equal(qx_alloc_live(), 0);
        if (rc == 0) {
            return;
        }
    }
    fail();
}

/* Any cut of the bytes gives the same text; every piece but invalid input is valid UTF-8. */
static void whole_characters(void **state)
{
    static const char text[] = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z";
    (void)state;
    for (size_t cut = 1; cut <= 4; cut++) {
        struct qx_text_stream s = {0};
        struct qx_buf all = {0};
        for (size_t i = 0; i < sizeof text - 1; i += cut) {
            struct qx_buf piece = {0};
            size_t n = sizeof text - 1 - i < cut ? sizeof text - 1 - i : cut;
            qx_text_stream_push(&s, text + i, n, &piece);
            assert_true(qx_utf8_valid(piece.p, piece.n));
            qx_buf_add(&all, piece.p, piece.n);
            qx_buf_fini(&piece);
        }
        qx_text_stream_end(&s, &all);
        assert_string_equal(qx_buf_cstr(&all), text);
        qx_buf_fini(&all);
    }
}

static void terminals(void **state)
{
    static const struct { const char *in, *terminal; } t[] = {
        {"a\x1b[31mred\x1b[0mb", "aredb"},
        {"x\x1b]0;title\x07y", "xy"},
        {"x\x1b]0;title\x1b\\y", "xy"},
        {"x\x1b(By", "xy"},
        {"tab\tline\nbell\x07", "tab\tline\nbell"},
        {"\xff" "a\xc3", "\xef\xbf\xbd" "a\xef\xbf\xbd"},
        {"\xf0\x9f" "A", "\xef\xbf\xbd" "A"},
        {"\xc2\x9b" "31mred", "red"},
        {"a\r\nb", "a\nb"},
    };
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(t); i++) {
        for (int terminal = 0; terminal < 2; terminal++) {
            struct qx_text_stream s = {.terminal = terminal != 0};
            struct qx_buf b = {0};
            for (const char *p = t[i].in; *p; p++) {
                qx_text_stream_push(&s, p, 1, &b);
            }
            qx_text_stream_end(&s, &b);
            assert_string_equal(qx_buf_cstr(&b), terminal ? t[i].terminal : t[i].in);
            qx_buf_fini(&b);
        }
    }
}

static void stop_texts(void **state)
{
    static const char *const stops[] = {"STOP", "\n\n", "abcabd"};
    static const struct { const char *in, *out; bool stopped; } t[] = {
        {"hello STOP there", "hello ", true},
        {"hello STO", "hello STO", false},
        {"x\ny\n\nz", "x\ny", true},
        {"abcabcabd!", "abc", true},
        {"abcab", "abcab", false},
        {"STOSTOP", "STO", true},
        {"", "", false},
    };
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(t); i++) {
        for (size_t cut = 1; cut < 8; cut++) {
            struct qx_stop_texts s = {.v = stops, .n = 3};
            struct qx_buf b = {0};
            bool stopped = false;
            size_t len = strlen(t[i].in);
            for (size_t k = 0; k < len && !stopped; k += cut) {
                stopped = qx_stop_texts_push(&s, t[i].in + k, len - k < cut ? len - k : cut, &b);
            }
            if (!stopped) {
                qx_stop_texts_end(&s, &b);
            }
            assert_int_equal(stopped, t[i].stopped);
            assert_string_equal(qx_buf_cstr(&b), t[i].out);
            qx_buf_fini(&b);
            qx_stop_texts_fini(&s);
        }
    }
}

static void base64(void **state)
{
    static const char *const t[][2] = {{"", ""}, {"f", "Zg=="}, {"fo", "Zm8="}, {"foo", "Zm9v"},
                                       {"foob", "Zm9vYg=="}, {"\xff\xfe\xfd", "//79"}};
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(t); i++) {
        struct qx_buf b = {0};
        qx_buf_base64(&b, t[i][0], strlen(t[i][0]));
        assert_string_equal(qx_buf_cstr(&b), t[i][1]);
        qx_buf_fini(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(renderings), cmocka_unit_test(tool_preamble), cmocka_unit_test(out_of_memory),
        cmocka_unit_test(whole_characters), cmocka_unit_test(terminals), cmocka_unit_test(stop_texts),
        cmocka_unit_test(base64),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
