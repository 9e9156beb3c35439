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

// Key is the AES-128 key of one tenant id.
type Key [16]byte

// ParseKey reads 32 hexadecimal digits. Its error never repeats them: they may be most of a key.
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

// Cipher turns plaintext addresses into ciphertext addresses and back: one AES-128 block.
type Cipher struct{ block cipher.Block }

// NewCipher schedules the key once; a Cipher may be used by several goroutines.
func NewCipher(k Key) *Cipher {
	block, err := aes.NewCipher(k[:])
	if err != nil {
		panic(err) // 16 bytes are always a key
	}
	return &Cipher{block}
}

// Encrypt turns an IPv6 address into the one its containers see.
func (c *Cipher) Encrypt(a netip.Addr) netip.Addr {
	b := a.As16()
	c.block.Encrypt(b[:], b[:])
	return netip.AddrFrom16(b)
}

// Decrypt undoes Encrypt. Every ciphertext decrypts to something: whether it was made under this
// key shows in the plaintext's base prefix and tenant id alone.
func (c *Cipher) Decrypt(a netip.Addr) netip.Addr {
	b := a.As16()
	c.block.Decrypt(b[:], b[:])
	return netip.AddrFrom16(b)
}

// ErrExhausted means no index is left for this node, tenant id and app.
var ErrExhausted = errors.New("no index left whose ciphertext lies in the private prefix")

// Draw tries indexes upward from p.Index until the ciphertext lies in the private prefix, and
// returns the plain address that did it and its ciphertext. On average it takes
// 2^(private prefix length) tries: 256 for a /8, about 4 µs.
func (c *Cipher) Draw(private netip.Prefix, p Plain) (Plain, netip.Addr, error) {
	b := make([]byte, 16) // one for all tries: what a cipher is given escapes
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
