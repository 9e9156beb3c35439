package nimitz_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// regional returns a lab with two regions. Green and gold have the same addresses; green has node subnets and gold has
// none. Blue is on netpila. A further tenant exists only in the east, so that tenant IDs, and so VNIs, differ between
// the regions.
func regional() lab.Spec {
	cidrs := map[string][]netip.Prefix{
		"west": {netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd12:1::/48")},
		"east": {netip.MustParsePrefix("10.2.0.0/16"), netip.MustParsePrefix("fd12:2::/48")},
	}
	return lab.Spec{
		Regions: []lab.Region{
			{Name: "west", BasePrefix: netip.MustParsePrefix("fd70:696c:6100::/40"), Nodes: []string{"w1", "w2"},
				Edge: "we"},
			{Name: "east", BasePrefix: netip.MustParsePrefix("fd70:696c:6200::/40"), Nodes: []string{"e1"}, Edge: "ee"},
		},
		Tenants: []lab.Tenant{
			{Name: "eastern", Network: tenant.Nimitz,
				Regions: map[string][]netip.Prefix{"east": {netip.MustParsePrefix("10.9.0.0/16")}}},
			{Name: "green", Network: tenant.Nimitz, Regions: cidrs},
			{Name: "gold", Network: tenant.Nimitz, Regions: cidrs, NoNodeCIDRs: true},
			{Name: "blue"},
		},
		Containers: []lab.Container{
			{Name: "green-w1", Node: "w1", Tenant: "green"}, {Name: "green-w2", Node: "w2", Tenant: "green"},
			{Name: "green-e1", Node: "e1", Tenant: "green"},
			{Name: "gold-w1", Node: "w1", Tenant: "gold"}, {Name: "gold-e1", Node: "e1", Tenant: "gold"},
			{Name: "blue-w1", Node: "w1", Tenant: "blue"}, {Name: "blue-w2", Node: "w2", Tenant: "blue"},
		},
	}
}

// TestRegions has tenants in two regions, each with its own orchestrator and Edge Switch (NIMITZ §3.1, cross-region
// traffic; NM6). Containers of a tenant reach each other across regions, and reach no container of another tenant with
// the same addresses. Traffic continues without orchestrators.
func TestRegions(t *testing.T) {
	for _, on := range []struct{ nodes, edges string }{{lab.EBPF, lab.EBPF}, {lab.OVS, lab.OVS}, {lab.EBPF, lab.OVS}} {
		t.Run(on.nodes+"-"+on.edges, func(t *testing.T) {
			t.Parallel() // most of the time it waits
			spec := regional()
			spec.Name, spec.Nimitz = fmt.Sprintf("r%s-%s-%d", on.nodes, on.edges, os.Getpid()), on.nodes
			spec.Switches = lab.Switches{"we": on.edges, "ee": on.edges}
			l := labtest.New(t, spec)
			vnis(t, l)
			eastWest(t, l)
			transfers(t, l, [][2]string{{"green-w1", "green-e1"}, {"green-e1", "green-w2"}, {"gold-e1", "gold-w1"}})
			unkept(t, l)
			apartAndJoined(t, l)
		})
	}
}

// vnis checks that a tenant's ID differs between the regions.
func vnis(t *testing.T, l *lab.Lab) {
	ids := map[uint32]bool{}
	for _, region := range []string{"west", "east"} {
		got, err := l.OperatorOf(region).GetTenant(labtest.Context(t),
			connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "green"}))
		must(t, err)
		ids[got.Msg.Tenant.Ids[0].Id] = true
	}
	if len(ids) != 2 {
		t.Fatalf("unexpected ids of green: %v", ids)
	}
}

// transfers sends more than one segment by TCP in each direction and family. Senders leave segmentation and checksums
// to their devices, but virtual devices do not perform them.
func transfers(t *testing.T, l *lab.Lab, pairs [][2]string) {
	for _, pair := range pairs {
		to, err := l.Container(pair[1])
		must(t, err)
		for _, a := range to.Addresses() {
			if err := echoed(t, l, pair[0], pair[1], a); err != nil {
				t.Errorf("TCP from %s to %s at %v: %v", pair[0], pair[1], a, err)
			}
		}
	}
}

// echoed sends a megabyte from one container to another, which echoes it.
func echoed(t *testing.T, l *lab.Lab, from, to string, at netip.Addr) error {
	client, err := l.Namespace(from)
	must(t, err)
	defer client.Close()
	server, err := l.Namespace(to)
	must(t, err)
	defer server.Close()
	var listener net.Listener
	must(t, server.Do(func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(at, 0).String())
		return err
	}))
	defer listener.Close()
	go func() {
		if c, err := listener.Accept(); err == nil {
			_, _ = io.Copy(c, c) // the client reports missing data
			c.Close()
		}
	}()
	var c net.Conn
	if err := client.Do(func() (err error) {
		c, err = net.DialTimeout("tcp", listener.Addr().String(), 10*time.Second)
		return err
	}); err != nil {
		return err
	}
	defer c.Close()
	must(t, c.SetDeadline(time.Now().Add(30*time.Second)))
	sent := make([]byte, 1<<20)
	rand.Read(sent)
	go func() {
		_, _ = c.Write(sent)
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err == nil && !bytes.Equal(got, sent) {
		err = fmt.Errorf("got %d of %d bytes, or different ones", len(got), len(sent))
	}
	return err
}

// unkept kills agents, also those of Edge Switches, while no orchestrator runs. Meanwhile no packet may be lost, and
// all entries must remain.
func unkept(t *testing.T, l *lab.Lab) {
	ctx := labtest.Context(t)
	for _, region := range []string{"west", "east"} {
		must(t, l.KillNoRestart(ctx, lab.OrchestratorOf(region)))
	}
	results := make(chan packet.PingResult)
	senders := [][2]string{{"green-w1", "green-e1"}, {"gold-e1", "gold-w1"}, {"blue-w1", "blue-w2"}}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	for _, s := range senders {
		go func() {
			results <- ping(ctx, t, l, s[0], s[1])
		}()
	}
	for _, node := range []string{"we", "ee", "w1", "e1"} {
		if _, err := l.Kill(ctx, lab.AgentProcess(node)); err != nil {
			t.Error(err)
		}
	}
	for range senders {
		r := <-results
		if r.Sent != pings || r.Received != r.Sent {
			t.Errorf("%d of %d packets arrived while agents were killed, without orchestrators", r.Received, r.Sent)
		}
	}
	for _, region := range []string{"west", "east"} {
		must(t, l.Start(ctx, lab.OrchestratorOf(region)))
	}
	for _, node := range []string{"we", "ee", "w1", "w2", "e1"} {
		must(t, l.Await(ctx, lab.AgentProcess(node)))
	}
	eastWest(t, l)
}

const pings = 200

func ping(ctx context.Context, t *testing.T, l *lab.Lab, from, to string) packet.PingResult {
	c, err := l.Container(to)
	if err != nil {
		t.Error(err)
		return packet.PingResult{}
	}
	ns, err := l.Namespace(from)
	if err != nil {
		t.Error(err)
		return packet.PingResult{}
	}
	defer ns.Close()
	r, err := packet.Ping(ctx, ns, c.Address, packet.PingOptions{Count: pings, Interval: 20 * time.Millisecond})
	if err != nil {
		t.Error(err)
	}
	return r
}

// apartAndJoined disconnects the two regions, and connects them again for one tenant only. The nodes' entries must
// change accordingly, so that only this tenant's containers reach each other across regions.
func apartAndJoined(t *testing.T, l *lab.Lab) {
	ctx := labtest.Context(t)
	to := address(t, l, "green-e1")
	reaches := func(want bool) {
		for {
			if _, answered := echo(ctx, t, l, "green-w1", to, 200*time.Millisecond); answered == want {
				return
			}
			pause(ctx, t)
		}
	}
	west := l.OperatorOf("west")
	_, err := west.DeleteRegion(ctx, connect.NewRequest(&pilasterv1.DeleteRegionRequest{Name: "east"}))
	must(t, err)
	reaches(false)
	exported, err := l.OperatorOf("east").ExportRegion(ctx, connect.NewRequest(&pilasterv1.ExportRegionRequest{}))
	must(t, err)
	_, err = west.ImportRegion(ctx,
		connect.NewRequest(&pilasterv1.ImportRegionRequest{Region: exported.Msg.Region, Tenants: []string{"green"}}))
	must(t, err)
	reaches(true)
	if _, answered := echo(ctx, t, l, "gold-w1", address(t, l, "gold-e1"), 200*time.Millisecond); answered {
		t.Error("gold is not exported, but reaches the other region")
	}
}
