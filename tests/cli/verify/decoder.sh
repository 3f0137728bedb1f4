# The external decoder: the ready one agrees; one that hangs, babbles, stops or lies is found out.
try() { qx verify "$SAMPLE" --sample 2 -t '*ngram_embedding' --decoder-timeout 1 --decoder "$1" > out 2> err; echo "$?: $(grep -o "decode[a-z]*-[a-z]*" out | sort -u)"; }
/usr/bin/python3 -c 'import numpy' 2> /dev/null || { echo "no numpy" >&2; exit 77; }
dir=$(dirname "$SAMPLE")/tests/decoders
[ -e "$dir/qx_decode.py" ] || dir=$SAMPLE/../tests/decoders
qx verify "$SAMPLE" --sample 2 -t '*.layers.1.*expert*0.*' --decoder "/usr/bin/python3 $dir/qx_decode.py" > out 2> err
echo "$?: $(grep -c 'decoded twice' out)"
try 'sleep 60 #'
try 'yes #'
try 'true #'
try 'false #'
try 'no-such-program'
# shellcheck disable=SC2016 # the decoder's shell expands it
try 'while read r; do echo $r 0000; done #'
