package demo

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

func TestDemo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	root := filepath.Join("/run", labtest.Name(t)) // not the folder of a demo that runs with --keep
	var out bytes.Buffer
	err := Run(labtest.Context(t), &out, Options{Binary: labtest.Binary(t), Command: "pilaster", Root: root})
	t.Log(out.String())
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		"3 nodes, 2 tenants, 6 containers", "30 of 30 as expected; 36 packets across tenants, 36 dropped",
		"node 1 | blue | app 1 → node 3 | blue | app 2", "1,500 bytes in, 1,500 bytes on the wire",
		"first packet", "0 entries for other nodes", "dropped 100,000", "tenant-mismatch",
		"no packet arrived (6 captures", "0 packets left b1", "; the host sees fd70:696c:6100:1:0:ff:",
		"0 of 3 answered: from outside",
		"has 3 backends on 3 nodes", "r3 removed under load", "of 2 open ones to others, 0 ended", "Lab removed",
	} {
		if !strings.Contains(out.String(), line) {
			t.Errorf("the output lacks %q", line)
		}
	}
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("the folder %s exists after the demo: %v", root, err)
	}
}

// Each section must fail if what it checks does not work in the lab.
func TestSectionsFail(t *testing.T) {
	spec := spec
	spec.Name = ""
	l := labtest.New(t, spec)
	ctx := labtest.Context(t)

	// As in the demo: after service, late segments to the container that it removes are drops.
	type demoSection struct {
		name  string
		check func(*proof, context.Context) error
	}
	sections := []demoSection{
		{"reach", (*proof).reach}, {"places", (*proof).places},
		{"speed", func(p *proof, ctx context.Context) error { return p.speed(ctx, beside{1, 1}) }},
		{"entries", (*proof).entries}, {"attacks", (*proof).attacks}, {"outside", (*proof).outside},
		{"service", (*proof).service},
	}
	run := func(section string) error {
		p := &proof{lab: l, out: io.Discard}
		i := slices.IndexFunc(sections, func(s demoSection) bool { return s.name == section })
		if err := sections[i].check(p, ctx); err != nil {
			return err
		}
		if len(p.failed) > 0 {
			return &failure{p.failed}
		}
		return nil
	}
	for _, section := range sections {
		if err := run(section.name); err != nil {
			t.Fatalf("%s on an intact lab: %v", section.name, err)
		}
	}

	t.Run("a foreign route on a node", func(t *testing.T) {
		prefix, err := l.Prefix("n3")
		if err != nil {
			t.Fatal(err)
		}
		route := &netlink.Route{Dst: &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(64, 128)}, LinkIndex: 1}
		inside(t, l, "n1", func(h *netlink.Handle) error { return h.RouteAdd(route) })
		if err := run("entries"); err == nil {
			t.Error("entries: no failure, want one")
		}
		inside(t, l, "n1", func(h *netlink.Handle) error { return h.RouteDel(route) })
	})
	t.Run("a container that is cut off", func(t *testing.T) {
		address, err := l.Address("b3")
		if err != nil {
			t.Fatal(err)
		}
		// b3 receives packets, but its kernel drops its replies.
		hole := &netlink.Route{
			Dst:      &net.IPNet{IP: net.ParseIP("fc00::"), Mask: net.CIDRMask(8, 128)},
			Type:     6,
			Priority: 1,
		} // RTN_BLACKHOLE
		inside(t, l, "b3", func(h *netlink.Handle) error { return h.RouteAdd(hole) })
		for _, section := range []string{"reach", "speed", "attacks"} {
			if err := run(section); err == nil {
				t.Errorf("%s: no failure although %v does not answer", section, address)
			}
		}
		inside(t, l, "b3", func(h *netlink.Handle) error { return h.RouteDel(hole) })
	})
	t.Run("no route to the host outside", func(t *testing.T) {
		outside := &netlink.Route{Dst: &net.IPNet{IP: net.ParseIP("2001:db8:f00d::"), Mask: net.CIDRMask(64, 128)},
			Type: 6, Priority: 1} // RTN_BLACKHOLE
		inside(t, l, lab.Router, func(h *netlink.Handle) error { return h.RouteAdd(outside) })
		if err := run("outside"); err == nil {
			t.Error("outside: no failure, want one")
		}
		inside(t, l, lab.Router, func(h *netlink.Handle) error { return h.RouteDel(outside) })
		if err := l.DeleteEgress(ctx, "blue", netip.MustParsePrefix("::/0")); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("a backend that does not answer", func(t *testing.T) {
		hole := &netlink.Route{Dst: &net.IPNet{IP: net.ParseIP("fc00::"), Mask: net.CIDRMask(8, 128)}, Type: 6,
			Priority: 1} // RTN_BLACKHOLE
		inside(t, l, "r2", func(h *netlink.Handle) error { return h.RouteAdd(hole) })
		if err := run("service"); err == nil {
			t.Error("service: no failure, want one")
		}
		inside(t, l, "r2", func(h *netlink.Handle) error { return h.RouteDel(hole) })
	})
	t.Run("a small MTU on the way", func(t *testing.T) {
		inside(t, l, "b1", func(h *netlink.Handle) error { return setMTU(h, 1400) })
		if err := run("places"); err == nil {
			t.Error("places: no failure, want one")
		}
		inside(t, l, "b1", func(h *netlink.Handle) error { return setMTU(h, 1500) })
	})
	for _, section := range sections {
		if err := run(section.name); err != nil {
			t.Errorf("%s on the repaired lab: %v", section.name, err)
		}
	}
}

type failure struct{ failed []string }

func (f *failure) Error() string { return strings.Join(f.failed, "; ") }

func inside(t *testing.T, l *lab.Lab, name string, do func(*netlink.Handle) error) {
	t.Helper()
	ns, err := l.Namespace(name)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	h, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := do(h); err != nil {
		t.Fatal(err)
	}
}

func setMTU(h *netlink.Handle, mtu int) error {
	link, err := h.LinkByName(lab.Interface)
	if err != nil {
		return err
	}
	return h.LinkSetMTU(link, mtu)
}
