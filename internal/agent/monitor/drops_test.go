package monitor

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/dpapi"
)

// TestSettingsAreKept: settings are reconciled at each tick, before problems are logged.
func TestSettingsAreKept(t *testing.T) {
	var calls []string
	ticks := make(chan time.Time)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		settings := func() error { calls = append(calls, "ReconcileSettings"); return nil }
		status := func(context.Context) (dpapi.Status, error) {
			calls = append(calls, "Status")
			return dpapi.Status{}, nil
		}
		new(DropWindow).Run(ctx, settings, status, ticks, slog.New(slog.DiscardHandler))
	}()
	ticks <- time.Time{}
	ticks <- time.Time{}
	cancel()
	<-done
	if want := []string{"ReconcileSettings", "Status"}; len(calls) < 4 || !slices.Equal(calls[:2], want) ||
		!slices.Equal(calls[2:4], want) {
		t.Errorf("called %v", calls)
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

// A slow watcher loses only its own events and receives their number; the others lose none.
func TestSlowWatcherIsTold(t *testing.T) {
	var h Hub
	slow, stop := h.Watch()
	defer stop()
	for n := range eventsAhead + 10 {
		h.publish(dpapi.Event{Count: uint64(n)})
	}
	for n := range eventsAhead {
		if e := <-slow; e.Count != uint64(n) || e.Lost != 0 {
			t.Fatalf("event %d is %+v", n, e)
		}
	}
	h.publish(dpapi.Event{Lost: 1})
	if e := <-slow; e.Lost != 11 {
		t.Errorf("%d lost events reported, want 11", e.Lost)
	}
}

func TestDropsOfTheLastMinute(t *testing.T) {
	var w DropWindow
	if n := w.Since(dpapi.Drops{Reason: "x", Packets: 5}); n != 0 {
		t.Errorf("without a sample: %d", n)
	}
	tick := make(chan time.Time)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	var packets uint64
	status := func(context.Context) (dpapi.Status, error) {
		packets += 20
		return dpapi.Status{Drops: []dpapi.Drops{{Reason: "x", Packets: packets}}}, nil
	}
	go func() {
		defer close(ended)
		w.Run(ctx, func() error { return nil }, status, tick, slog.New(slog.DiscardHandler))
	}()
	for range samplesKept + 5 {
		tick <- time.Time{}
	}
	cancel()
	<-ended
	first := w.samples[0]["x"]
	if len(w.samples) != samplesKept || w.Since(dpapi.Drops{Reason: "x", Packets: first + 7}) != 7 ||
		w.Since(dpapi.Drops{Reason: "x", Packets: first - 1}) != 0 ||
		w.Since(dpapi.Drops{Reason: "new", Packets: 3}) != 0 {
		t.Errorf("%d samples, first %d", len(w.samples), first)
	}
}
