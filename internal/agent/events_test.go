package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

func TestMonitor(t *testing.T) {
	b := newServiceBed(t)
	b.service.Serve(b.Core, nil)
	b.add("c1")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- b.service.events.run(ctx, b.driver, slog.New(slog.DiscardHandler)) }()
	stream, err := b.client.Monitor(ctx, connect.NewRequest(&pilasterv1.MonitorRequest{Types: []string{"drop"}}))
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(5, 0)
	b.driver.events <- dpapi.Event{Time: at, Type: "trace", Reason: "unwanted"}
	b.driver.events <- dpapi.Event{
		Time: at, Type: "drop", Reason: "src-not-own", Hook: "container", Count: 3, Endpoint: 1, Lost: 2, Length: 80,
		Source: netip.MustParseAddr("fc00::1"), Destination: netip.MustParseAddr("fc00::2"), Protocol: 17,
		SourcePort: 1, DestinationPort: 2,
	}
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	m := stream.Msg()
	if m.Reason != "src-not-own" || m.Endpoint != "default/c1" || m.Source != "fc00::1" || m.Count != 3 ||
		m.LostEvents != 2 ||
		!m.Time.AsTime().Equal(at) {
		t.Errorf("event %v", m)
	}
	cancel()
	stream.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A slow watcher loses only its own events and receives their number; the others lose none.
func TestSlowWatcherIsTold(t *testing.T) {
	var h eventHub
	slow, stop := h.watch()
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
	var w dropWindow
	if n := w.since(dpapi.Drops{Reason: "x", Packets: 5}); n != 0 {
		t.Errorf("without a sample: %d", n)
	}
	d := newFakeDriver()
	tick := make(chan time.Time)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	var packets uint64
	d.during = func(string, endpoint.Record) {
		packets += 10
		d.status.Drops = []dpapi.Drops{{Reason: "x", Packets: packets}}
	}
	go func() {
		defer close(ended)
		w.run(
			ctx,
			d.ReconcileSettings,
			func(context.Context) (dpapi.Status, error) { return d.Status() },
			tick,
			slog.New(slog.DiscardHandler),
		)
	}()
	for range samplesKept + 5 {
		tick <- time.Time{}
	}
	cancel()
	<-ended
	first := w.samples[0]["x"]
	if len(w.samples) != samplesKept || w.since(dpapi.Drops{Reason: "x", Packets: first + 7}) != 7 ||
		w.since(dpapi.Drops{Reason: "x", Packets: first - 1}) != 0 ||
		w.since(dpapi.Drops{Reason: "new", Packets: 3}) != 0 {
		t.Errorf("%d samples, first %d", len(w.samples), first)
	}
}
