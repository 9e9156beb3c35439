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

// cut plays a scenario that ends early, because of its time limit or because before fails or interrupts the run.
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

// TestInterrupted: text and JSON results mark an interrupted event.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	r, shown, err := cut(t, twoEvents, func(interrupt func()) error { interrupt(); return nil })
	const why = `interrupted during "reconnect"`
	if err == nil || err.Error() != why || r.Error != why || r.Pass() || len(r.Stages) != 2 || r.Stages[0].Unfinished ||
		!r.Stages[1].Unfinished {
		t.Errorf("ended with %v: %+v", err, r)
	}
	for _, want := range []string{why + "; the figures below cover only the part that was done\n", "\nreconnect " +
		"(unfinished)\t", "\nstopped early: " + why + "\n"} {
		if !strings.Contains(shown, want) {
			t.Errorf("the text lacks %q:\n%s", want, shown)
		}
	}
}

// TestFailed: the result of a failed event is not a success.
func TestFailed(t *testing.T) {
	t.Parallel()
	r, shown, err := cut(t, twoEvents, func(func()) error { return errors.New("no more") })
	if err == nil || r.Error != "no more" || r.Pass() || strings.Contains(shown, "passed") {
		t.Errorf("ended with %v: %s", err, shown)
	}
}

// TestOverTime: the error names the exceeded time limit, not the call that the limit cancelled.
func TestOverTime(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"{nodes: 2000, containersPerNode: 9, limits: {time: 1s}}", "{nodes: 2, limits: " +
		"{time: 1ms}}"} {
		r, shown, err := cut(t, text, nil)
		last := regexp.MustCompile(
			`\nexceeded: the scenario's time limit of 1m?s was exceeded ` +
				`(during "set up"|while the orchestrator started)\n$`,
		)
		if err != nil || r.Pass() || r.Stages == nil || !last.MatchString(shown) {
			t.Errorf("ended with %v: %s", err, shown)
		}
	}
}

// TestText: the text leaves out counts that are 0, and its last line has the outcome.
func TestText(t *testing.T) {
	t.Parallel()
	_, shown, err := cut(
		t,
		"{nodes: 3, containersPerNode: 1, events: [{do: shrink, by: 1}]}",
		func(func()) error { return nil },
	)
	if err != nil || !strings.HasSuffix(shown, "\npassed: all invariants and limits held\n") ||
		strings.Contains(shown, "nimitz-") ||
		strings.Contains(shown, "shrink 1, by kind") {
		t.Errorf("%v: %s", err, shown)
	}
	if row := regexp.MustCompile(`\nshrink 1\t.*\t-\t-\t[0-9]+ MiB\n`); !row.MatchString(shown) {
		t.Errorf("an ADD latency is shown although there was no ADD: %s", shown)
	}
}
