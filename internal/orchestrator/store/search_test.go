package store_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// fill writes mappings of tenant green on a node: consecutive addresses from first.
func fill(t *testing.T, etcd *clientv3.Client, first string, many int) {
	t.Helper()
	var puts []clientv3.Op
	a := netip.MustParseAddr(first)
	for range many {
		puts = append(
			puts,
			clientv3.OpPut(
				fmt.Sprintf("/pilaster/1/mappings/green/%x/%d", a.AsSlice(), a.BitLen()),
				`{"node":"fd70:696c:6100:1::/64","name":"n1"}`,
			),
		)
		a = a.Next()
	}
	for some := range slices.Chunk(puts, 128) {
		if _, err := etcd.Txn(t.Context()).Then(some...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
}

// pages counts requests of type Do, which read several keys.
type pages struct {
	clientv3.KV
	read atomic.Int64
}

func (p *pages) Do(ctx context.Context, op clientv3.Op) (clientv3.OpResponse, error) {
	p.read.Add(1)
	return p.KV.Do(ctx, op)
}

// The store finds the only free address of many with few requests. The decision in the batch, for which other changes
// wait, needs one request.
func testOneFreeAddress(t *testing.T, etcd *clientv3.Client) {
	count := &pages{KV: etcd.KV}
	etcd.KV = count
	defer func() { etcd.KV = count.KV }()
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/19")
	hosts(t, s, "green", 1)
	fill(t, etcd, "10.0.0.1", 8189)
	before := count.read.Load()
	if got := allocate(t, s, 1, "green", "c1/eth0"); got != "10.0.31.254/32" {
		t.Errorf("got %s, want the only free address 10.0.31.254/32", got)
	}
	// Two fetches of the records, three pages, and one page in the batch.
	if n := count.read.Load() - before; n > 6 {
		t.Errorf("%d requests to find the address, want at most 6", n)
	}
	before = count.read.Load()
	_, err := s.Allocate(ctx, node(1), "green", "c2/eth0", 0)
	refused(t, err, store.Full, "all 8190 addresses")
	if n := count.read.Load() - before; n > 5 {
		t.Errorf("%d requests to find no address, want at most 5", n)
	}
}

// The keys of both IP families sort together, so keys of one family may be between those of the other.
func testInterleavedFamilies(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	nimitz(t, s, "green", "32.1.13.0/24", "2001:db8::/48") // 2001:0db8 is 32.1.13.184
	hosts(t, s, "green", 1)
	fill(t, etcd, "32.1.13.1", 253)
	fill(t, etcd, "2001:db8::1", 5000)
	if got := allocate(t, s, 1, "green", "c1/eth0"); got != "32.1.13.254/32 2001:db8::1389/128" {
		t.Errorf("got %s, want the next free address of each family", got)
	}
}
