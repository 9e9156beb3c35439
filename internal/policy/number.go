package policy

import (
	"crypto/sha256"
	"encoding/binary"
)

// place is where a rule stands: its policy in the order of evaluation, and where in that.
type place struct {
	policy    int
	direction Direction
	rule      int // or Isolation
}

// numbers are those of all rules of a tenant: by policy and direction, that of isolation first.
type numbers [][2][]uint32

func (n numbers) at(p place) uint32 { return n[p.policy][p.direction][p.rule-Isolation] }

// number gives each rule its number: bits of a hash of what it is called, so that it stays what it is when other
// policies come and go, and is another one in audit, where its count means another thing. Where two would be the same,
// the later one gets the next that is free.
func number(tenant string, policies []*Policy) (n numbers) {
	taken := make(map[uint32]struct{}, 4*len(policies))
	var text []byte
	for _, p := range policies {
		kind := "rule\x00"
		if p.Audit {
			kind = "audited\x00"
		}
		text = append(text[:0], kind+tenant+"\x00"+p.String()+"\x00"...)
		var of [2][]uint32
		for _, d := range directions {
			if !p.touches(d) {
				continue
			}
			for rule := Isolation; rule < len(p.Rules[d]); rule++ {
				sum := sha256.Sum256(binary.BigEndian.AppendUint32(append(text, byte(d)), uint32(int32(rule))))
				of[d] = append(of[d], free(taken, binary.BigEndian.Uint32(sum[:])>>(32-numberBits)))
			}
		}
		n = append(n, of)
	}
	return n
}

// free is the first number from n on that is not taken; it is from then on.
func free(taken map[uint32]struct{}, n uint32) uint32 {
	for _, is := taken[n]; n == 0 || is; _, is = taken[n] {
		n = (n + 1) & (1<<numberBits - 1)
	}
	taken[n] = struct{}{}
	return n
}
