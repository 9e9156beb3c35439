package address

import (
	"crypto/aes"
	"crypto/sha256"
	"encoding/binary"
	"net"
)

// A MAC has a first byte of its own, locally administered and unicast, and 40 bits of node and endpoint. 06:70 begins
// the MACs of macvlans, 02:70 those of links.
const (
	macPrefix  = 0x0a
	macIDBits  = 16
	macNumbers = 1 << 24 // of nodes
	macRounds  = 4
	macHalf    = 20
)

// MAC returns the MAC of an endpoint of a node, which is unique in the cluster. A container must not learn its node, so
// the bits are permuted under the cluster's UUID, which containers do not know. The permutation is a Feistel network:
// it maps no two endpoints to one MAC. 24 bits hold every node number of a base prefix of /40 or longer. Of a larger
// number they hold a hash, so MACs are then unique with high probability only.
//
// An endpoint that moves to another node keeps its MAC. Its first node must not use the endpoint id again until the
// endpoint is gone.
func MAC(cluster string, node uint64, id uint16) net.HardwareAddr {
	key := sha256.Sum256([]byte("pilaster container MAC " + cluster))
	block, err := aes.NewCipher(key[:16])
	if err != nil {
		panic(err) // cannot fail: the key has 16 bytes
	}
	if node >= macNumbers {
		sum := sha256.Sum256(binary.BigEndian.AppendUint64(nil, node))
		node = uint64(binary.BigEndian.Uint32(sum[:])) % macNumbers
	}
	bits := node<<macIDBits | uint64(id)
	const mask = 1<<macHalf - 1
	left, right := uint32(bits>>macHalf), uint32(bits&mask)
	for round := range macRounds {
		var in [16]byte
		in[0] = byte(round)
		binary.BigEndian.PutUint32(in[1:], right)
		block.Encrypt(in[:], in[:])
		left, right = right, left^binary.BigEndian.Uint32(in[:])&mask
	}
	b := binary.BigEndian.AppendUint64(nil, uint64(left)<<macHalf|uint64(right))
	b[2] = macPrefix
	return b[2:]
}
