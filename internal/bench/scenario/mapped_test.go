package scenario

import (
	"context"
	"os"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/packet"
)

// TestMappings: the two containers of networks with mappings reach each other.
func TestMappings(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for name, build := range map[string]func(*Wire) (Pair, error){"ila": onILA, "evpn": onEVPN} {
		t.Run(name, func(t *testing.T) {
			w, err := NewWire(t.TempDir())
			must(t, err)
			defer w.Close()
			p, err := build(w)
			must(t, err)
			r, err := packet.Ping(context.Background(), p.Client, p.Target, packet.PingOptions{
				Count: 3, Timeout: 20 * time.Second,
			})
			if err != nil || r.Received != 3 {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
}
