package hostnet

import (
	"context"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

func TestOverlap(t *testing.T) {
	private := netip.MustParsePrefix("fc00::/8")
	all := func(prefixes ...string) (list []localPrefix) {
		for _, p := range prefixes {
			list = append(list, localPrefix{netip.MustParsePrefix(p), "br-kind"})
		}
		return list
	}
	if err := checkOverlap(private,
		all("::/0", "fe80::/64", "fd70:696c:6100:1::1/128", "2001:db8::/32", "ff00::/8")); err != nil {
		t.Errorf("nothing of it overlaps: %v", err)
	}
	for _, p := range []string{"fc00:f853:ccd:e793::/64", "fc00::/7", "fc00::/8", "fcff::1/128"} {
		err := checkOverlap(private, all("::/0", p))
		if err == nil || !strings.Contains(err.Error(), p+" on br-kind") ||
			!strings.Contains(err.Error(), "nothing was changed") {
			t.Errorf("%s: %v", p, err)
		}
	}
}

// logHandler sends log messages to a test.
type logHandler chan string // of messages

func (h logHandler) Enabled(_ context.Context, l slog.Level) bool  { return l >= slog.LevelInfo }
func (h logHandler) Handle(_ context.Context, r slog.Record) error { h <- r.Message; return nil }
func (h logHandler) WithAttrs([]slog.Attr) slog.Handler            { return h }
func (h logHandler) WithGroup(string) slog.Handler                 { return h }

// On a real node: at the start, and when an address comes and goes later.
func TestOverlapOfARealNode(t *testing.T) {
	ns := testNetns(t)
	handle, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	address := func(last byte) *netlink.Addr {
		ip := netip.MustParseAddr("fc00::").As16()
		ip[15] = last
		a, err := netlink.ParseAddr(netip.PrefixFrom(netip.AddrFrom16(ip), 128).String())
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	w := &OverlapWatch{private: netip.MustParsePrefix("fc00::/8")}
	ctx, cancel := context.WithCancel(t.Context())
	log, ended := make(logHandler, 1), make(chan error, 1)
	go func() {
		ended <- ns.Do(func() error { return w.Run(ctx, slog.New(log)) })
	}()
	last := byte(0)
	for said := ""; said == ""; {
		if last < 255 {
			last++
			if err := handle.AddrReplace(lo, address(last)); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case said = <-log:
			if !strings.Contains(said, "no endpoint is added") {
				t.Errorf("said %q", said)
			}
		case err := <-ended:
			t.Fatalf("ended early: %v", err)
		default:
		}
	}
	if err := w.Problem(); err == nil || !strings.Contains(err.Error(), "on lo") {
		t.Errorf("problem %v", err)
	}
	for ; last > 0; last-- {
		if err := handle.AddrDel(lo, address(last)); err != nil {
			t.Fatal(err)
		}
	}
	if said := <-log; !strings.Contains(said, "is gone") || w.Problem() != nil {
		t.Errorf("said %q, problem %v", said, w.Problem())
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Each change of an address is signalled, whatever device it is on, and so is the start.
func TestChangesOfAddressesAreTold(t *testing.T) {
	ns := testNetns(t)
	handle, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	changed, also, ended := make(chan struct{}, 1), make(chan struct{}, 1), make(chan error, 1)
	w := NewOverlapWatch(netip.MustParsePrefix("fc00::/8"), changed, also)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { ended <- ns.Do(func() error { return w.Run(ctx, slog.New(slog.DiscardHandler)) }) }()
	a, err := netlink.ParseAddr("2001:db8::7/128")
	if err != nil {
		t.Fatal(err)
	}
	for i, change := range []func() error{
		func() error { return nil },
		func() error { return handle.AddrReplace(lo, a) },
		func() error { return handle.AddrDel(lo, a) },
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
		for _, told := range []chan struct{}{changed, also} {
			select {
			case <-told:
			case <-time.After(20 * time.Second):
				t.Fatalf("change %d was not signalled", i)
			}
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
