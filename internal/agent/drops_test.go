package agent

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

// TestWhatIsWrongIsLoggedOnce: when it begins, and when it is over.
func TestWhatIsWrongIsLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	var known []string
	for _, problems := range [][]string{nil, {"not first"}, {"not first", "link is gone"}, {"link is gone"}, nil, nil} {
		tellNews(known, problems, slog.New(slog.NewTextHandler(&log, nil)))
		known = problems
	}
	for _, p := range []string{"not first", "link is gone"} {
		for _, want := range []string{
			`level=ERROR msg="the packet path is not as it should be" problem="` + p + `"`,
			`level=INFO msg="the packet path is right again" problem="` + p + `"`,
		} {
			if n := strings.Count(log.String(), want); n != 1 {
				t.Errorf("%d times %s in\n%s", n, want, log.String())
			}
		}
	}
	if n := strings.Count(log.String(), "\n"); n != 4 {
		t.Errorf("%d lines, want 4:\n%s", n, log.String())
	}
}
