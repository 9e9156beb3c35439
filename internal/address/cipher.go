package address

import (
	"crypto/aes"
	"crypto/cipher"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
)

// Key is the AES-128 key of one tenant ID.
type Key [16]byte

// ParseKey reads 32 hexadecimal digits. Its error never contains the input, which may be most of a key.
func ParseKey(s string) (Key, error) {
	b, err := hex.DecodeString(s)
	switch {
	case len(s) != 2*len(Key{}):
		return Key{}, fmt.Errorf("key has %d characters; it must be %d hexadecimal digits", len(s), 2*len(Key{}))
	case err != nil:
		return Key{}, fmt.Errorf(
			"key has characters that are not hexadecimal digits; it must be %d of them",
			2*len(Key{}),
		)
	}
	return Key(b), nil
}

func (k Key) String() string { return hex.EncodeToString(k[:]) }

// LogValue keeps keys out of logs.
func (k Key) LogValue() slog.Value { return slog.StringValue("(key)") }

// Cipher converts between plaintext and ciphertext addresses: one AES-128 block.
type Cipher struct{ block cipher.Block }

// NewCipher expands the key once. Several goroutines may use one Cipher.
func NewCipher(k Key) *Cipher {
	block, err := aes.NewCipher(k[:])
	if err != nil {
		panic(err) // cannot fail: a Key has 16 bytes
	}
	return &Cipher{block}
}

// Encrypt turns a plaintext address into the ciphertext address that containers see.
func (c *Cipher) Encrypt(a netip.Addr) netip.Addr {
	b := a.As16()
	c.block.Encrypt(b[:], b[:])
	return netip.AddrFrom16(b)
}

// Decrypt is the inverse of Encrypt. It has a result for every address. Only the base prefix and the tenant ID of the
// result show whether the address was encrypted under this key.
func (c *Cipher) Decrypt(a netip.Addr) netip.Addr {
	b := a.As16()
	c.block.Decrypt(b[:], b[:])
	return netip.AddrFrom16(b)
}

// ErrExhausted means that this node, tenant ID and app have no index left.
var ErrExhausted = errors.New("no index left whose ciphertext lies in the private prefix")

// Draw tries indexes upward from p.Index until the ciphertext lies in the private prefix. It returns the fields of that
// address and its ciphertext. On average it needs 2^(private prefix length) tries: 256 for a /8, about 4 µs.
func (c *Cipher) Draw(private netip.Prefix, p Plain) (Plain, netip.Addr, error) {
	b := make([]byte, 16) // one buffer for all tries, because it escapes to the heap
	for p.Index = max(p.Index, 1); p.Index <= MaxIndex; p.Index++ {
		plain := p.Addr().As16()
		copy(b, plain[:])
		c.block.Encrypt(b, b)
		if a := netip.AddrFrom16([16]byte(b)); private.Contains(a) {
			return p, a, nil
		}
	}
	return Plain{}, netip.Addr{}, ErrExhausted
}
