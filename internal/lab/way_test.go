package lab

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestWayTo: an address of a container stands for the container: one that says its tenant anywhere, another one in the
// tenant of the sender.
func TestWayTo(t *testing.T) {
	l := newLab(folder(filepath.Join(t.TempDir(), "demo")))
	if err := os.MkdirAll(l.folder.path("hosts"), 0o755); err != nil {
		t.Fatal(err)
	}
	a := netip.MustParseAddr
	for _, c := range []struct{ name, node, tenant, address, plaintext string }{
		{"b1", "n1", "blue", "fc00::1", "fd70::1"}, {"b2", "n2", "blue", "fc00::2", "fd70::2"},
		{"r1", "n2", "red", "fc00::3", "fd70::3"},
		{"g1", "n1", "green", "10.0.0.1", ""}, {"g2", "n2", "green", "10.0.0.2", ""},
		{"l1", "n1", "lime", "10.0.0.3", ""}, {"l2", "n2", "lime", "10.0.0.2", ""},
	} {
		at := Attachment{Network: "nimitz", Address: a(c.address)}
		if c.plaintext != "" {
			at.Network, at.Plaintext = "netpila", a(c.plaintext)
		}
		l.state.Containers = append(l.state.Containers, ContainerStatus{
			Container: Container{Name: c.name, Node: c.node, Tenant: c.tenant}, Address: at.Address,
			Attachments: []Attachment{at},
		})
	}
	if err := l.save(); err != nil {
		t.Fatal(err)
	}
	all := func(netip.Addr) bool { return true }
	for _, c := range []struct{ from, to, receiver, destination string }{
		{"b1", "b2", "b2", "fc00::2"}, {"b1", "fc00::2", "b2", "fc00::2"}, {"b1", "fd70::2", "b2", "fc00::2"},
		{"b1", "fc00::3", "r1", "fc00::3"}, {"b1", "fc00::77", "", "fc00::77"},
		{"g1", "10.0.0.2", "g2", "10.0.0.2"}, {"l1", "10.0.0.2", "l2", "10.0.0.2"}, {"g1", "10.0.0.3", "", "10.0.0.3"},
	} {
		way, err := l.WayTo(context.Background(), c.from, c.to, all)
		if err != nil || way.To.Name != c.receiver || way.Destination != a(c.destination) ||
			way.Source != way.From.Address || way.From.Name != c.from {
			t.Errorf("%s to %s: %q at %v, %v; want %q at %s", c.from, c.to, way.To.Name, way.Destination, err,
				c.receiver, c.destination)
		}
	}
	for _, c := range []struct {
		from, to string
		fits     func(netip.Addr) bool
		want     string
	}{
		{"fc00::1", "b2", all, "name the container"}, {"b9", "b2", all, "pilaster lab status lists them"},
		{"b1", "b9", all, "pilaster lab status lists them"}, {"b1", "g1", all, "two tenants, blue and green"},
		{"b1", "b2", netip.Addr.Is4, "of the family"}, {"g1", "l2", all, "the address of g2 in tenant green too"},
	} {
		_, err := l.WayTo(context.Background(), c.from, c.to, c.fits)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s to %s: %v; want %s", c.from, c.to, err, c.want)
		}
	}
}
