package datapath

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
)

// FuzzKernelCipher: the kernel's cipher encrypts any address as Go's AES-128 does, under the key that was set last for
// the id. Without a key the program changes nothing and returns no-key.
func FuzzKernelCipher(f *testing.F) {
	b := newProgBench(f)
	const first, keyless = 0x5000, 0x5002 // unused ids; two have keys
	old := address.Key{15: 1}
	f.Add(make([]byte, 16), make([]byte, 16), byte(0))
	f.Add(bytes.Repeat([]byte{0x11}, 16), b.b3.Addr().AsSlice(), byte(2))
	f.Fuzz(func(t *testing.T, key, addr []byte, which byte) {
		if len(key) < 16 || len(addr) < 16 {
			t.Skip("too short for a key and an address")
		}
		ciphers := map[uint32]*address.Cipher{}
		for id, k := range map[uint32]address.Key{first: address.Key(key[:16]), first + 1: old} {
			must(t, b.datapath.setKey(id, old)) // what is there already is replaced
			must(t, b.datapath.setKey(id, k))
			ciphers[id] = address.NewCipher(k)
		}
		id := first + uint32(which)%(keyless-first+1)
		frame := make([]byte, ipv6At+40)
		frame[12], frame[13], frame[ipv6At] = 0x86, 0xdd, 0x60
		want := frame[ipv6At+24:]
		copy(want, addr[:16])
		want[8], want[9], want[10] = byte(id>>16), byte(id>>8), byte(id)
		plain := netip.AddrFrom16([16]byte(want))

		out := make([]byte, len(frame))
		result, err := b.datapath.Objects.PilTryCipher.Run(&ebpf.RunOptions{Data: frame, DataOut: out})
		must(t, err)
		if c := ciphers[id]; c != nil {
			seen := c.Encrypt(plain).As16()
			copy(frame[ipv6At+8:], seen[:])
		}
		if has := ciphers[id] != nil; has != (result == 0) || !has && dropreason.Reason(result).String() != "no-key" ||
			!bytes.Equal(out, frame) {
			t.Fatalf("result %d for %v under %x, and\n%x, should be\n%x", result, plain, key[:16], out, frame)
		}
	})
}
