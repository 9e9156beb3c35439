package scenario

import (
	"context"
	"os"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/packet"
)

// TestILA: the two containers of the scenario reach each other.
func TestILA(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	w, err := NewWire(t.TempDir())
	must(t, err)
	defer w.Close()
	p, err := onILA(w)
	must(t, err)
	r, err := packet.Ping(context.Background(), p.Client, p.Target, packet.PingOptions{
		Count: 3, Timeout: 20 * time.Second,
	})
	if err != nil || r.Received != 3 {
		t.Errorf("%+v, %v", r, err)
	}
}
