package endpoint

import (
	"errors"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/address"
)

// In a subnet, every address can be allocated again after a crash, no address is allocated twice, and every released
// address is quarantined.
func TestSubnetAcrossRestarts(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	of := CursorKey{Tenant: 7, Subnet: netip.MustParsePrefix("10.0.3.0/29")}
	within := func(from address.Index) (address.Index, error) {
		if from > 6 {
			return 0, address.ErrExhausted
		}
		return from, nil
	}
	s := open(t, dir, c)
	has := map[address.Index]ID{}
	put := func(want int) {
		t.Helper()
		for range want {
			i, err := s.AllocateIndex(of, within)
			if err != nil || has[i] != 0 {
				t.Fatalf("allocated %d, %v, in use are %v", i, err, has)
			}
			a, _ := AddressIn(of.Subnet, i)
			r := record(ID(len(has)+1), 1)
			r.ContainerID += a.String()
			r.Attachments = []Attachment{
				{Network: "nimitz", Address: a, Gateway: netip.MustParseAddr("169.254.1.1"), Subnet: of.Subnet},
			}
			if err := s.Put(r); err != nil {
				t.Fatal(err)
			}
			has[i] = r.ID
		}
	}
	put(2)
	if _, err := s.AllocateIndex(of, within); err != nil { // for an ADD that a crash interrupts
		t.Fatal(err)
	}
	s = open(t, dir, c) // after a crash
	put(2)
	if err := errors.Join(s.ReleaseIndex(of, 2), s.Delete(has[2])); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s = open(t, dir, c)
	}
	put(2)
	if i, err := s.AllocateIndex(of, within); !errors.Is(err, ErrExhausted) {
		t.Errorf("allocated %d, %v with %v in use and one quarantined, want ErrExhausted", i, err, has)
	}
	s = open(t, dir, c)
	c.advance(MinQuarantine)
	if i, err := s.AllocateIndex(of, within); i != 2 || err != nil {
		t.Errorf("allocated %d, %v after the quarantine, want 2", i, err)
	}
}
