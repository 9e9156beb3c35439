package api

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dpapi"
)

func TestMonitor(t *testing.T) {
	b := newServiceBed(t)
	b.service.Serve(b.Core, nil)
	b.MustAdd("c1")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- b.service.events.Run(ctx, b.Driver, slog.New(slog.DiscardHandler)) }()
	stream, err := b.client.Monitor(ctx, connect.NewRequest(&pilasterv1.MonitorRequest{Types: []string{"drop"}}))
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(5, 0)
	b.Driver.Emit <- dpapi.Event{Time: at, Type: "trace", Reason: "unwanted"}
	b.Driver.Emit <- dpapi.Event{
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
