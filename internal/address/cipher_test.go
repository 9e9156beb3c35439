package address

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// NP4, §6.2: what containers see is AES-128 of the plaintext address under the tenant's key.
// FIPS 197 appendix C.1 is the vector.
func TestCipherVector(t *testing.T) {
	key, err := ParseKey("000102030405060708090a0b0c0d0e0f")
	if err != nil {
		t.Fatal(err)
	}
	plain := netip.MustParseAddr("11:2233:4455:6677:8899:aabb:ccdd:eeff")
	want := netip.MustParseAddr("69c4:e0d8:6a7b:430:d8cd:b780:70b4:c55a")
	c := NewCipher(key)
	if got := c.Encrypt(plain); got != want {
		t.Errorf("encrypted to %v, want %v", got, want)
	}
	if got := c.Decrypt(want); got != plain {
		t.Errorf("decrypted to %v, want %v", got, plain)
	}
}

// NP4, §6.2: OpenSSL is the reference. 1,000 random addresses under ten random keys, in both directions.
func TestOpenSSLAgrees(t *testing.T) {
	const keys, each = 10, 100
	for range keys {
		var key Key
		random := make([]byte, each*16)
		rand.Read(key[:])
		rand.Read(random)
		c := NewCipher(key)
		var encrypted, decrypted []byte
		for block := range slices.Chunk(random, 16) {
			a := netip.AddrFrom16([16]byte(block))
			encrypted = append(encrypted, c.Encrypt(a).AsSlice()...)
			decrypted = append(decrypted, c.Decrypt(a).AsSlice()...)
		}
		if !bytes.Equal(encrypted, openssl(t, key, "-e", random)) {
			t.Errorf("OpenSSL encrypts %x differently under %x", random, key[:])
		}
		if !bytes.Equal(decrypted, openssl(t, key, "-d", random)) {
			t.Errorf("OpenSSL decrypts %x differently under %x", random, key[:])
		}
	}
}

func openssl(t *testing.T, key Key, direction string, in []byte) []byte {
	t.Helper()
	cmd := exec.Command("openssl", "enc", "-aes-128-ecb", "-nopad", direction, "-K", key.String())
	cmd.Stdin = bytes.NewReader(in)
	out, err := cmd.Output()
	if err != nil || len(out) != len(in) {
		t.Fatalf("openssl: %v, %d bytes of %d", err, len(out), len(in))
	}
	return out
}

func FuzzCipher(f *testing.F) {
	f.Add(make([]byte, 16), make([]byte, 16))
	f.Fuzz(func(t *testing.T, key, address []byte) {
		if len(key) != 16 || len(address) != 16 {
			return
		}
		c, a := NewCipher(Key(key)), netip.AddrFrom16([16]byte(address))
		if got := c.Decrypt(c.Encrypt(a)); got != a {
			t.Errorf("%v came back as %v", a, got)
		}
		if got := c.Encrypt(c.Decrypt(a)); got != a {
			t.Errorf("%v came back as %v", a, got)
		}
	})
}

func TestParseKey(t *testing.T) {
	const good = "000102030405060708090a0b0c0d0eFF"
	key, err := ParseKey(good)
	if err != nil || key.String() != strings.ToLower(good) {
		t.Errorf("ParseKey(%q) = %v, %v", good, key, err)
	}
	for _, bad := range []string{"", good[1:], good + "0", good + "00", "g" + good[1:], " " + good[1:]} {
		_, err := ParseKey(bad)
		if err == nil {
			t.Errorf("ParseKey took %q", bad)
		} else if len(bad) > 8 && strings.Contains(err.Error(), bad[2:8]) {
			t.Errorf("the error repeats the key: %v", err)
		}
	}
}

func FuzzParseKey(f *testing.F) {
	f.Add("000102030405060708090a0b0c0d0e0f")
	f.Fuzz(func(t *testing.T, s string) {
		if k, err := ParseKey(s); err == nil && !strings.EqualFold(k.String(), s) {
			t.Errorf("ParseKey(%q) is %v", s, k)
		}
	})
}

func TestKeysStayOutOfLogs(t *testing.T) {
	var log bytes.Buffer
	key := Key{0xab, 0xcd}
	slog.New(slog.NewTextHandler(&log, nil)).Info("made", "key", key)
	if strings.Contains(log.String(), "abcd") || !strings.Contains(log.String(), "made") {
		t.Errorf("logged %q", log.String())
	}
}

func testKey(t *testing.T) Key {
	t.Helper()
	b, err := hex.DecodeString("70696c61737465722d746573742d6b65")
	if err != nil {
		t.Fatal(err)
	}
	return Key(b)
}

// Draw returns the first suitable index from the cursor on, and skips none.
func TestDrawTakesTheFirstThatServes(t *testing.T) {
	c, plan := NewCipher(testKey(t)), DefaultPlan()
	p := Plain{Node: netip.MustParsePrefix("fd70:696c:6100:3::/64"), Tenant: 1, App: 1}
	for range 50 {
		from := max(p.Index, 1)
		got, a, err := c.Draw(plan.Private, p)
		if err != nil {
			t.Fatal(err)
		}
		if !plan.Private.Contains(a) || c.Decrypt(a) != got.Addr() || got.Tenant != 1 || got.App != 1 {
			t.Fatalf("found %+v, %v", got, a)
		}
		for i := from; i < got.Index; i++ {
			p.Index = i
			if plan.Private.Contains(c.Encrypt(p.Addr())) {
				t.Fatalf("index %d serves and was passed over for %d", i, got.Index)
			}
		}
		p.Index = got.Index + 1
	}
}

// Repeated Draws over all indexes find about as many addresses as Usable says, and then return ErrExhausted.
func TestDrawFindsWhatThePlanPromises(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	for _, private := range []string{"fc00::/8", "8000::/10"} {
		t.Run(private, func(t *testing.T) {
			plan := DefaultPlan()
			plan.Private = netip.MustParsePrefix(private)
			c := NewCipher(testKey(t))
			p := Plain{Node: netip.MustParsePrefix("fd70:696c:6100:3::/64"), Tenant: 7, App: 9}
			found := 0
			for {
				drawn, _, err := c.Draw(plan.Private, p)
				if errors.Is(err, ErrExhausted) {
					break
				}
				found++
				p.Index = drawn.Index + 1
			}
			// The number has a binomial distribution. The test accepts five standard deviations in both directions.
			want := plan.Usable()
			if d := found - want; d*d > 25*want {
				t.Errorf("%d addresses, %d promised", found, want)
			}
		})
	}
}

func TestDrawBeyondTheLastIndex(t *testing.T) {
	c := NewCipher(testKey(t))
	p := Plain{Node: netip.MustParsePrefix("fd70:696c:6100:3::/64"), Tenant: 1, Index: MaxIndex + 1}
	if got, a, err := c.Draw(DefaultPlan().Private, p); !errors.Is(err, ErrExhausted) {
		t.Errorf("found %+v, %v, %v", got, a, err)
	}
}

func ExampleCipher_Draw() {
	key, _ := ParseKey("000102030405060708090a0b0c0d0e0f")
	p, a, _ := NewCipher(key).Draw(DefaultPlan().Private, Plain{
		Node: netip.MustParsePrefix("fd70:696c:6100:1::/64"), Tenant: 1, App: 1,
	})
	fmt.Println(p.Addr(), "is", a, "to containers")
	// Output: fd70:696c:6100:1:0:100:100:3bc is fc88:83c1:cf8:1561:4d50:127a:8d8b:f640 to containers
}
