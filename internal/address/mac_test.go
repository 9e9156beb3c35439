package address

import (
	"bytes"
	"testing"
)

// TestMAC: no two endpoints of a cluster have the same MAC, and all MACs are locally administered and unicast.
func TestMAC(t *testing.T) {
	seen := map[[6]byte]bool{}
	count := 0
	for _, node := range []uint64{1, 2, 3, 4, 256, 65536, 1<<24 - 2, 1<<24 - 1} {
		for id := 1; id <= 65535; id += 1 + int(node)%7 {
			mac := MAC("cluster", node, uint16(id))
			if len(mac) != 6 || mac[0]&3 != 2 || mac[0] != 0x0a {
				t.Fatalf("endpoint %d of node %d has MAC %v", id, node, mac)
			}
			seen[[6]byte(mac)] = true
			count++
		}
	}
	if len(seen) != count {
		t.Errorf("%d endpoints have %d MACs", count, len(seen))
	}
}

// TestMACOfLargeNodeNumbers: node numbers that do not fit into a MAC count whole.
func TestMACOfLargeNodeNumbers(t *testing.T) {
	seen := map[[6]byte]bool{}
	for high := range uint64(100) {
		seen[[6]byte(MAC("cluster", (high+1)<<24|7, 1))] = true
	}
	seen[[6]byte(MAC("cluster", 7, 1))] = true
	if len(seen) != 101 {
		t.Errorf("101 nodes have %d MACs", len(seen))
	}
}

// TestMACHidesNode: MACs of a node's endpoints look random, and depend on the cluster's UUID.
func TestMACHidesNode(t *testing.T) {
	if got, want := MAC("cluster", 2, 1).String(), MAC("cluster", 2, 1).String(); got != want {
		t.Errorf("MAC changes: %s, %s", got, want)
	}
	if bytes.Equal(MAC("cluster", 2, 1), MAC("another", 2, 1)) {
		t.Error("the MAC does not depend on the cluster")
	}
	const tries = 4000
	var ones [40]int
	for id := range uint16(tries) {
		a, b := MAC("cluster", 2, id), MAC("cluster", 2, id+1)
		for bit := range ones {
			if (a[1+bit/8]^b[1+bit/8])>>(bit%8)&1 == 1 {
				ones[bit]++
			}
		}
	}
	for bit, n := range ones {
		if n < tries*2/5 || n > tries*3/5 {
			t.Errorf("bit %d differs between %d of %d neighbours", bit, n, tries)
		}
	}
}
