package agent

import (
	"bytes"
	"context"
	"log/slog"
	"pilaster.io/pilaster/internal/dpapi"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestSettingsAreKept: settings are reconciled at each tick, before problems are logged.
func TestSettingsAreKept(t *testing.T) {
	d, ticks := newFakeDriver(), make(chan time.Time)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		status := func(context.Context) (dpapi.Status, error) { return d.Status() }
		new(dropWindow).run(ctx, d.ReconcileSettings, status, ticks, slog.New(slog.DiscardHandler))
	}()
	ticks <- time.Time{}
	ticks <- time.Time{}
	cancel()
	<-done
	if want := []string{"KeepSettings", "Status"}; len(d.calls) < 4 || !slices.Equal(d.calls[:2], want) ||
		!slices.Equal(d.calls[2:4], want) {
		t.Errorf("called %v", d.calls)
	}
}

// TestWhatIsWrongIsLoggedOnce: when it begins, and when it is over.
func TestWhatIsWrongIsLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	var known []string
	for _, problems := range [][]string{nil, {"not first"}, {"not first", "link is gone"}, {"link is gone"}, nil, nil} {
		logProblems(known, problems, slog.New(slog.NewTextHandler(&log, nil)))
		known = problems
	}
	for _, p := range []string{"not first", "link is gone"} {
		for _, want := range []string{
			`level=ERROR msg="the packet path has a problem" problem="` + p + `"`,
			`level=INFO msg="a problem of the packet path is resolved" problem="` + p + `"`,
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
