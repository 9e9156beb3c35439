package sim

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"
)

// cut plays a scenario that ends early, by its limit or because of what happens before an event.
func cut(t *testing.T, text string, before func(interrupt func()) error) (*Result, string, error) {
	t.Helper()
	s, err := Parse("scenario.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "sim") // short, for a socket
	if err != nil {
		t.Fatal(err)
	}
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	r, err := Run(
		ctx,
		s,
		Options{Dir: dir, Log: slog.New(slog.DiscardHandler), Before: func(string) error { return before(interrupt) }},
	)
	var shown strings.Builder
	r.Text(&shown)
	return r, shown.String(), err
}

const twoEvents = "{nodes: 2, containersPerNode: 1, events: [{do: reconnect}]}"

// TestInterrupted: the event that was interrupted is marked, and it is said to people and to programs.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	r, shown, err := cut(t, twoEvents, func(interrupt func()) error { interrupt(); return nil })
	const why = `interrupted during "reconnect"`
	if err == nil || err.Error() != why || r.Error != why || r.Pass() || len(r.Stages) != 2 || r.Stages[0].Unfinished ||
		!r.Stages[1].Unfinished {
		t.Errorf("it ends with %v: %+v", err, r)
	}
	for _, want := range []string{why + "; what follows is of the part that was done\n", "\nreconnect " +
		"(unfinished)\t", "\nnot all was done: " + why + "\n"} {
		if !strings.Contains(shown, want) {
			t.Errorf("it lacks %q:\n%s", want, shown)
		}
	}
}

// TestFailed: so is an event that fails.
func TestFailed(t *testing.T) {
	t.Parallel()
	r, shown, err := cut(t, twoEvents, func(func()) error { return errors.New("no more") })
	if err == nil || r.Error != "no more" || r.Pass() || strings.Contains(shown, "all held") {
		t.Errorf("it ends with %v: %s", err, shown)
	}
}

// TestOverTime: a limit of time is named, whatever the call says that it cuts short.
func TestOverTime(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"{nodes: 2000, containersPerNode: 9, limits: {time: 1s}}", "{nodes: 2, limits: " +
		"{time: 1ms}}"} {
		r, shown, err := cut(t, text, nil)
		last := regexp.MustCompile(
			`\nexceeded: the scenario's limit of 1m?s was over (during "set up"|while the orchestrator started)\n$`,
		)
		if err != nil || r.Pass() || r.Stages == nil || !last.MatchString(shown) {
			t.Errorf("it ends with %v: %s", err, shown)
		}
	}
}

// TestText: what there was none of is not shown as 0, and the last line says how it came out.
func TestText(t *testing.T) {
	t.Parallel()
	_, shown, err := cut(
		t,
		"{nodes: 3, containersPerNode: 1, events: [{do: shrink, by: 1}]}",
		func(func()) error { return nil },
	)
	if err != nil || !strings.HasSuffix(shown, "\nall held, within the limits\n") ||
		strings.Contains(shown, "nimitz-") ||
		strings.Contains(shown, "shrink 1, by kind") {
		t.Errorf("%v: %s", err, shown)
	}
	if row := regexp.MustCompile(`\nshrink 1\t.*\t-\t-\t[0-9]+ MiB\n`); !row.MatchString(shown) {
		t.Errorf("without an ADD it is not left open how long one took: %s", shown)
	}
}
