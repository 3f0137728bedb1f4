# As a CI job would: exit codes decide, JSON says why. A sound checkpoint passes; damage is told apart from
# a checkpoint that cannot be looked at and from a wrong command line.
get() { # jq-style: get FILE 'expression over d'
    /usr/bin/python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"
}
gate() { # what a deployment step does with the exit code
    qx verify "$1" --json > report.json 2> err
    case $? in
    0) echo "deploy" ;;
    1) echo "refuse: $(get report.json "d['counts']['error']") error(s), first $(get report.json "d['findings'][0]['kind']")" ;;
    3) echo "cannot check: $(get report.json "d['kind']")" ;;
    *) echo "broken job" ;;
    esac
}
cp -r "$SAMPLE" good
chmod -R u+w good
gate good
[ "$(get report.json "d['status'], d['level'], d['counts']['error']")" = "('ok', 'scales', 0)" ] || cat report.json

cp -r good cut
truncate -s -100 cut/model-00003-of-00005.safetensors
gate cut

cp -r good lost
rm lost/model-00002-of-00005.safetensors
gate lost

cp -r good noconfig
rm noconfig/config.json
gate noconfig
gate nowhere

# Only warnings: still fine to deploy, and the report says what to look at.
cp -r good extra
cp good/model-00005-of-00005.safetensors extra/extra.safetensors
gate extra
get report.json "[(f['kind'], f['file']) for f in d['findings'] if f['severity'] == 'warning']"

# A pattern that matches nothing must not look like a pass.
qx verify good -t 'no.such.*' -q 2> err
rc=$?
[ $rc = 3 ] || echo "a pattern without a match: exit $rc"
