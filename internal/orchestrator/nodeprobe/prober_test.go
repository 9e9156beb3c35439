package nodeprobe

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"
)

// A node that does not answer is not usable, unless none answers: then the fault may be this machine's.
func TestProber(t *testing.T) {
	p, err := New(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	go p.read()
	here, dead := netip.IPv6Loopback(), netip.MustParseAddr("2001:db8:dead::1")
	rounds := func(n int) {
		for range n {
			_, next := p.round()
			time.Sleep(next / 4)
		}
	}
	want := func(a netip.Addr, usable, known bool) {
		t.Helper()
		if u, k := p.Usable(a); u != usable || k != known {
			t.Errorf("%v: usable %v, known %v, want %v, %v", a, u, k, usable, known)
		}
	}
	p.Watch(map[netip.Addr]bool{here: true, dead: true})
	want(here, false, false)
	rounds(2)
	want(here, true, true)
	want(dead, false, false)
	rounds(deadAfter)
	want(here, true, true)
	want(dead, false, true)
	p.Watch(map[netip.Addr]bool{dead: true})
	rounds(deadAfter + 1)
	want(dead, false, true) // it stays as it is
	other := netip.MustParseAddr("2001:db8:dead::2")
	p.Watch(map[netip.Addr]bool{other: true})
	rounds(deadAfter + 1)
	want(other, true, true)
	p.Watch(map[netip.Addr]bool{here: true, other: true}) // the network returns, but not yet for all
	rounds(2)
	want(here, true, true)
	want(other, true, true)
	rounds(deadAfter)
	want(other, false, true)
}
