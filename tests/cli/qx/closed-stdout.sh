# A reader that goes away is no failure and says nothing; a full disk is exit 4.
qx help | head -1 > /dev/null
[ "${PIPESTATUS[0]}" = 0 ] || echo "exit ${PIPESTATUS[0]}"
qx help > /dev/full 2> err
rc=$?
[ $rc = 4 ] || echo "full disk: exit $rc"
grep -q "No space left" err || cat err
