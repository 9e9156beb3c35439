package oncache

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

func TestOpenSaysWhatIsWrong(t *testing.T) {
	b := newBench(t, world{})
	must(t, b.ns.Do(func() error {
		policies, inherits := netlink.NewLinkAttrs(), netlink.NewLinkAttrs()
		policies.Name, inherits.Name = "policies", "inherits"
		return errors.Join(
			netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: policies, VxlanId: 1, Port: 1000, GBP: true}),
			netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: inherits, VxlanId: 1, Port: 1001, TOS: 1}))
	}))
	for want, change := range map[string]func(*Config){
		"oncache: no uplink: ":        func(c *Config) { c.Uplink = "no uplink" },
		"oncache: no device: ":        func(c *Config) { c.Device = "no device" },
		"contains bits of kube-proxy": func(c *Config) { c.MarkMask = 0xff00 },
		"6 or more contiguous bits":   func(c *Config) { c.MarkMask = 0x1f },
		"mark mask 0x101ff":           func(c *Config) { c.MarkMask = 0x101ff },
		"VTEP address invalid IP":     func(c *Config) { c.Address = netip.Addr{} },
		"VTEP address ::ffff:":        func(c *Config) { c.Address = netip.MustParseAddr("::ffff:192.0.2.1") },
		"VNI 16777216":                func(c *Config) { c.VNI = 1 << 24 },
		"would be valid for 1ms":      func(c *Config) { c.TTL = time.Millisecond },
		"third of nf_conntrack_udp":   func(c *Config) { c.TTL, c.Tracks = 11*time.Second, true },
		"has group policies":          func(c *Config) { c.Device = "policies" },
		"inherits TOS":                func(c *Config) { c.Device = "inherits" },
	} {
		c := b.config
		change(&c)
		must(t, b.ns.Do(func() error {
			o, err := Open(c)
			if err == nil {
				o.Close()
			}
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %q", err, want)
			}
			return nil
		}))
	}
}

// A container that leaves takes what leads to it along; its device may be gone.
func TestLeave(t *testing.T) {
	b := newBench(t, world{})
	join := func() { must(t, b.ns.Do(func() error { return b.Join("container", b.container) })) }
	join()
	b.fill(t)
	must(t, b.Leave("container", 99)) // another device that had the name
	must(t, b.ns.Do(func() error {
		if err := b.Join("container", 99); err == nil || !strings.Contains(err.Error(), "another one") {
			t.Errorf("another device joined: %v", err)
		}
		return nil
	}))
	if s, err := b.Stats(); err != nil || s.Flows == 0 {
		t.Errorf("got %+v: %v", s, err)
	}
	must(t, b.Leave("container", b.container))
	if s, err := b.Stats(); err != nil || s.Flows != 0 || s.Local != 0 || s.Remote != 1 || s.Evicted != 2 {
		t.Errorf("got %+v: %v", s, err)
	}
	must(t, b.Leave("container", b.container))
	join()
	must(t, b.ns.Do(func() error {
		d, err := linkByName("container")
		if err != nil {
			return err
		}
		if err := netlink.LinkDel(d); err != nil {
			return err
		}
		if err := b.Join("container", b.container); err == nil || !strings.Contains(err.Error(), "container") {
			t.Errorf("a device that is gone joined: %v", err)
		}
		return b.Leave("container", b.container)
	}))
}
