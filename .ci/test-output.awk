# Reads `go test -v ./...`: prints the closing line of a package that passed and everything of one
# that did not. A test skipped where all of them can run is a failure.
{ package = package $0 "\n" }
/^ *--- SKIP: / { skips = 1 }
/^(ok  |\?   )\t/ {
    if (skips) {
        printf "%sFAIL: skipped a test\n", package
        failed = 1
    } else
        print
}
/^FAIL\t/ { printf "%s", package; failed = 1 }
/^(ok  |\?   |FAIL)\t/ { package = ""; skips = 0; fflush() }
END {
    printf "%s", package # "FAIL" alone, or what go test said before it broke off
    exit failed
}
