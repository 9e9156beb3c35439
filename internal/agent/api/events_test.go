package api

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
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

// TestEventEnds: an event has the names of the endpoints here, and both addresses where the node has the tenant's key.
func TestEventEnds(t *testing.T) {
	b := agenttest.NewWithTwoNetworks(t)
	a := b.MustAdd("c1").Attachments[0]
	green, err := b.Add(t.Context(), b.Green("c2"))
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := address.Split(a.Plaintext)
	elsewhere.Node = netip.MustParsePrefix("fd70:696c:6100:77::/64")
	blue, _ := b.TenantOf(elsewhere.Tenant)
	elsewhere, seen, err := address.NewCipher(blue.Of(elsewhere.Tenant).Key).
		Draw(address.DefaultPlan().Private, elsewhere)
	if err != nil {
		t.Fatal(err)
	}
	here := &pilasterv1.PacketEnd{Endpoint: "default/c1", Address: a.Address.String(), Plaintext: a.Plaintext.String()}
	far := &pilasterv1.PacketEnd{Address: seen.String(), Plaintext: elsewhere.Addr().String()}
	inGreen := &pilasterv1.PacketEnd{Endpoint: cmp.Or(green.Pod, green.ContainerID), Address: "10.0.3.1"}
	never := elsewhere
	never.Index++
	for _, c := range []struct {
		name                  string
		endpoint              endpoint.ID
		source, destination   netip.Addr
		wantSource, wantOther *pilasterv1.PacketEnd
	}{
		{"as its container sends it", 1, a.Address, seen, here, far},
		{"as it leaves the node", 0, a.Plaintext, elsewhere.Addr(), here, far},
		{"an address that was never allocated", 1, a.Address, never.Addr(), here,
			&pilasterv1.PacketEnd{Plaintext: never.Addr().String()}},
		{"a ciphertext of no tenant", 1, a.Address, netip.MustParseAddr("fc00::1"), here, nil},
		{"an overlay", green.ID, netip.MustParseAddr("10.0.3.1"), netip.MustParseAddr("10.0.9.9"), inGreen, nil},
		{"an overlay address at another tenant's endpoint", 1, netip.MustParseAddr("10.0.3.1"), a.Address, nil, here},
	} {
		m := eventToProto(b.Core, dpapi.Event{Endpoint: c.endpoint, Source: c.source, Destination: c.destination})
		if !proto.Equal(m.SourceEnd, c.wantSource) || !proto.Equal(m.DestinationEnd, c.wantOther) {
			t.Errorf("%s: %v → %v, want %v → %v", c.name, m.SourceEnd, m.DestinationEnd, c.wantSource, c.wantOther)
		}
	}
	if m := eventToProto(b.Core, dpapi.Event{}); m.SourceEnd != nil || m.DestinationEnd != nil {
		t.Errorf("no IP: %v", m)
	}
}
