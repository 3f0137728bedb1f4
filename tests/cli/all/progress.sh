# Progress: never in a file unless asked for; then plain lines, few. -q silences it.
qx verify "$SAMPLE" --level full > /dev/null 2> err || echo "exit $?"
grep -q '%' err && echo "progress in a file: $(cat err)"
qx verify "$SAMPLE" --level full --progress always > /dev/null 2> err
grep -q "$(printf '\033')" err && echo "escape sequences in a file"
[ "$(wc -l < err)" -le 20 ] || echo "$(wc -l < err) lines"
grep -Eq '[KMG]iB.*\(100%\).*/s' err || echo "no progress: $(cat err)"
qx verify "$SAMPLE" --level full --progress always -q > /dev/null 2> err
[ -s err ] && cat err
qx run "$SAMPLE" --tokens 5 -n 1 -q --progress always 2> err > /dev/null
[ -s err ] && cat err
exit 0
