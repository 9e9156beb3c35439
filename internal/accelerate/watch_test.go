package accelerate

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/bpftest"
)

// TestRulesVoidAtOnce: each change of the rules voids the cache, also while the daemon's loop is busy, which then gets
// one event about all of them.
func TestRulesVoidAtOnce(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	const changes = 3
	ns := bpftest.Namespace(t, "node")
	ctx, cancel := context.WithCancel(t.Context())
	voided := make(chan int, changes)
	var w *watch
	n := 0
	err := ns.Do(func() (err error) {
		w, err = startWatch(ctx, func() error { n++; voided <- n; return fmt.Errorf("void %d", n) })
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { cancel(); w.done.Wait() }()
	for i := range changes {
		chain := exec.CommandContext(ctx, "iptables-nft", "-w", "-N", fmt.Sprint("c", i))
		if err := ns.Run(chain); err != nil {
			t.Fatal(err)
		}
		select {
		case <-voided:
		case <-time.After(10 * time.Second):
			t.Fatalf("change %d did not void the cache", i+1)
		}
	}
	cancel()
	w.done.Wait()
	if err := <-w.rules; err == nil || len(w.rules) > 0 {
		t.Errorf("the loop gets %v and %d more events", err, len(w.rules))
	}
}
