package datapath

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/gateway"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// TestGatewayOutlivesItsAgent: another build, with a new map for the gateway's devices, takes over the gateway without
// packet loss. Then SetMTU changes the gateway's MTUs, and missing parts are reported.
func TestGatewayOutlivesItsAgent(t *testing.T) {
	w := newUnderlayWire(t)
	c, name := w.add(t, 1, 7, 2), netip.MustParseAddr("fd10:9::9")
	w.toService(t, 1, 7, c, name, w.hostAddr)
	n := w.nodes[0]
	const count = 300
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // where all are lost, it does not wait for each
	defer cancel()
	echoes, failed := packet.PingResult{}, make(chan error, 1)
	go func() {
		var err error
		echoes, err = packet.Ping(ctx, c.ns, name, packet.PingOptions{Count: count, Interval: 10 * time.Millisecond})
		failed <- err
	}()
	must(t, os.Remove(filepath.Join(n.datapath.MapsDir(), bpfobj.PinNimNode)))
	old := n.datapath
	must(t, n.ns.Do(func() (err error) { n.datapath, err = Open(old.config); return err }))
	t.Cleanup(func() { n.datapath.Close() })
	s, err := n.datapath.Nimitz()
	must(t, err)
	w.switches[0] = s
	must(t, w.gateways[0].Close())
	config := w.gatewayConfig(0)
	must(t, n.ns.Do(func() (err error) { w.gateways[0], err = gateway.Open(t.Context(), config); return err }))
	t.Cleanup(func() { w.gateways[0].Close() })
	must(t, n.datapath.PlugUnderlay(pipeline.UnderlayDevice))
	_, err = n.datapath.Restore(t.Context(), []endpoint.Record{c.record}, func([]endpoint.Record) error {
		if err := s.Plug(t.Context(), pipeline.Port(c.record.ID),
			pipeline.Device{Name: c.record.Device.HostName}); err != nil {
			return err
		}
		return s.Plug(t.Context(), pipeline.Gateway, w.gateways[0].Device())
	})
	must(t, err)
	must(t, old.Close())
	if err := <-failed; err != nil || echoes.Sent != count || echoes.Received != count {
		t.Errorf("%d of %d echoes came back: %v", echoes.Received, echoes.Sent, err)
	}

	must(t, n.ns.Do(func() error { return w.gateways[0].SetMTU(1400) }))
	for device, want := range map[string]int{pipeline.GatewayDevice: 1330, pipeline.UnderlayDevice: 1400} {
		l, err := n.datapath.Netlink.LinkByName(device)
		must(t, err)
		if l.Attrs().MTU != want {
			t.Errorf("%s has an MTU of %d, not %d", device, l.Attrs().MTU, want)
		}
	}
	if err := w.gateways[0].SetMTU(1300); err == nil {
		t.Error("it has an MTU with which there is no IPv6")
	}
	status, err := n.datapath.Status()
	must(t, err)
	healthy := len(status.Problems)
	l, err := n.datapath.Netlink.LinkByName(pipeline.UnderlayDevice)
	must(t, err)
	must(t, n.datapath.Netlink.LinkDel(l))
	status, err = n.datapath.Status()
	must(t, err)
	if !status.Healthy || len(status.Problems) != healthy+1 ||
		!slices.ContainsFunc(status.Problems, func(p string) bool { return p[:13] == "the gateway's" }) {
		t.Errorf("without %s: %q", l.Attrs().Name, status.Problems)
	}
}
