package policies

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/address"
)

// TestTogether: merged updates have the effect of the single updates in order.
func TestTogether(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	names := func() (some []Document) {
		for i := range 4 {
			if r.IntN(3) == 0 {
				some = append(some, Document{Kind: "NetworkPolicy", Namespace: "default", Name: fmt.Sprint("p", i),
					Text: fmt.Sprintf(`{"text": %d}`, r.IntN(100))})
			}
		}
		return some
	}
	for range 2000 {
		is, one := newTenantPolicy(), newTenantPolicy()
		begun := Update{
			Documents: names(),
			Overrides: map[netip.Addr]address.AppID{netip.AddrFrom4([4]byte{0: 1}): 9},
		}
		is.apply(begun)
		one.apply(begun)
		var news []Update
		for range 1 + r.IntN(5) {
			n := Update{
				Tenant:    "blue",
				Whole:     r.IntN(6) == 0,
				Documents: names(),
				Removed:   names(),
				Overrides: map[netip.Addr]address.AppID{},
				Revision:  int64(1 + len(news)),
			}
			for i := range byte(3) {
				switch a := netip.AddrFrom4([4]byte{i}); r.IntN(4) {
				case 0:
					n.Overrides[a] = address.AppID(1 + r.IntN(9))
				case 1:
					n.EndedOverrides = append(n.EndedOverrides, a)
				}
			}
			had := maps.Clone(one.documents)
			hadOverrides := maps.Clone(one.overrides)
			news = append(news, n)
			if changed := one.apply(n); !changed &&
				(!maps.Equal(had, one.documents) || !maps.Equal(hadOverrides, one.overrides)) {
				t.Fatalf(
					"%+v changes nothing of %v, %v: now %v, %v",
					n,
					had,
					hadOverrides,
					one.documents,
					one.overrides,
				)
			}
		}
		all := MergeByTenant(news)
		if len(all) != 1 {
			t.Fatalf("%d of one tenant", len(all))
		}
		if all[0].Revision != int64(len(news)) {
			t.Fatalf("revision %d of %d updates", all[0].Revision, len(news))
		}
		if is.apply(all[0]); !maps.Equal(is.documents, one.documents) || !maps.Equal(is.overrides, one.overrides) ||
			len(is.parseErrors) != len(one.parseErrors) ||
			len(is.parsed) != len(one.parsed) {
			t.Fatalf(
				"of %+v: together %v, %v; one after the other %v, %v",
				news,
				is.documents,
				is.overrides,
				one.documents,
				one.overrides,
			)
		}
	}
}
