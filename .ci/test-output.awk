# Reads the output of `go test -v ./...`: prints the last line of a package that passed, and the full output of one that
# failed. A skipped test is a failure. With -v times=FILE it appends a line for every package and test to FILE:
# seconds, "package" or "test", name. Fewer than -v least=N tests are a failure: the pattern of tests is out of date.
function seconds(text) { gsub(/[^0-9.]/, "", text); return text + 0 }
{ package = package $0 "\n" }
/^ *--- SKIP: / { skips = 1 }
/^--- (PASS|FAIL): / { ran++ }
times && /^--- (PASS|FAIL): .* \([0-9.]+s\)$/ { tests[count++] = seconds($NF) "\ttest\t%s " $3 }
/^(ok  |\?   )\t/ {
    if (skips) {
        printf "%sFAIL: skipped a test\n", package
        failed = 1
    } else
        print
}
/^FAIL\t/ { printf "%s", package; failed = 1 }
/^(ok  |\?   |FAIL)\t/ {
    if (times && $3 ~ /^[0-9.]+s$/) print seconds($3) "\tpackage\t" $2 >> times
    for (i = 0; i < count; i++) printf tests[i] "\n", $2 >> times
    package = ""; skips = 0; count = 0; fflush()
}
END {
    printf "%s", package # "FAIL" alone, or the output before go test aborted
    if (ran < least) {
        printf "FAIL: ran %d tests, not %d\n", ran, least
        failed = 1
    }
    exit failed
}
