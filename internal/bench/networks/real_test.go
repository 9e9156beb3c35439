package networks

import (
	"context"
	"fmt"
	"math"
	"os"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// Bytes of a packet with a byte of payload over IPv6: Ethernet, IPv6, TCP with time stamps; and what VXLAN adds.
const (
	smallest = 14 + 40 + 32 + 1
	tunnel   = 40 + 8 + 8 + 14
	mtu      = 1500
	headers  = 40 + 32 // of a full segment in the container's packet
)

// TestWire: the fabric's counters give the bytes that headers have, and the kernel's tables what the scenario added.
func TestWire(t *testing.T) {
	for name, more := range map[string]int{"native": 0, "vxlan": tunnel} {
		picked, err := scenario.Pick(scenario.Scenarios(), []string{name})
		if err != nil {
			t.Fatal(err)
		}
		w, err := scenario.NewWire(t.TempDir() + "/wire")
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		pair, err := picked[0].Build(w)
		if err != nil {
			t.Fatal(err)
		}
		got, err := measureWire(t.Context(), Network{Name: name}, w, pair)
		if err != nil {
			t.Fatal(err)
		}
		if want := float64(2 * (smallest + more)); math.Abs(got.TransactionBytes-want) > 5 {
			t.Errorf("%s: a transaction takes %.1f bytes, want %.0f", name, got.TransactionBytes, want)
		}
		if want := mtu - headers - more; got.SegmentPayload != want || math.Round(got.SegmentBytes) != 14+mtu {
			t.Errorf("%s: %d bytes of payload in %.1f, want %d in %d", name, got.SegmentPayload, got.SegmentBytes, want,
				14+mtu)
		}
		want := KernelState{}
		if more > 0 {
			want = KernelState{FDB: 1, Neighbours: 1, Routes: 1}
		}
		if *got.Kernel != want {
			t.Errorf("%s: %+v for the other node, want %+v", name, *got.Kernel, want)
		}
	}
}

// TestClusters: in a simulated cluster, a real node has as many entries for other nodes as arithmetic predicts, and the
// orchestrator sends as many messages. PILASTER_NETWORKS_SIZE=1000x80 is the size of the claim.
func TestClusters(t *testing.T) {
	size := Size{Nodes: 5, Containers: 2}
	if text := os.Getenv("PILASTER_NETWORKS_SIZE"); text != "" {
		size.Followers = 8
		if _, err := fmt.Sscanf(text, "%dx%d", &size.Nodes, &size.Containers); err != nil {
			t.Fatalf("PILASTER_NETWORKS_SIZE=%s: %v; use NODESxCONTAINERS", text, err)
		}
	}
	o := Options{
		Events: 1, Look: 200 * time.Millisecond, Binary: labtest.Binary(t), Name: labName(),
		Progress: func(what string) { t.Log(what) },
	}
	all := All()
	for _, n := range all {
		for _, c := range n.Clusters {
			t.Run(c.Name, func(t *testing.T) {
				r, err := o.simulate(context.Background(), n, c, size)
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("%+v", r)
				if !r.Pass {
					t.Errorf("counted %+v, arithmetic says %+v", r.Figures, r.Predicted)
				}
				if len(r.Figures.Reachable) != 1 {
					t.Error("the container was not reached")
				}
			})
		}
	}
}

func labName() string { return fmt.Sprintf("nets-%d", os.Getpid()) }
