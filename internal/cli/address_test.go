package cli

import "testing"

func TestAddress(t *testing.T) {
	const (
		key    = "000102030405060708090a0b0c0d0e0f"
		plain  = "fd70:696c:6100:1:0:100:100:3bc"
		cipher = "fc88:83c1:cf8:1561:4d50:127a:8d8b:f640"
	)
	for _, c := range []struct {
		name, stdin string
		args        []string
		code        int
		stdout      string
		stderr      string
	}{
		{"encrypt", "", []string{"encrypt", "--key", key, plain}, ExitDone, cipher + "\n", ""},
		{"decrypt", "", []string{"decrypt", "--key", key, cipher}, ExitDone, plain + "\n", ""},
		{"two addresses", "", []string{"decrypt", "--key", key, cipher, cipher}, ExitDone, plain + "\n" + plain +
			"\n", ""},
		{"standard input", plain + "\n\n" + plain, []string{"encrypt", "--key", key}, ExitDone, cipher + "\n" + cipher +
			"\n", ""},
		{"empty input", "", []string{"encrypt", "--key", key}, ExitDone, "", ""},
		{"json", "", []string{"encrypt", "--key", key, "-o", "json", plain}, ExitDone,
			"[\n  {\n    \"ciphertext\": \"" + cipher + "\",\n    \"plaintext\": \"" + plain + "\"\n  }\n]\n", ""},

		{"bad key", "", []string{"encrypt", "--key", "00", plain}, ExitUsage, "",
			"error: --key: key has 2 characters; it must be 32 hexadecimal digits\n"},
		{"one bad address of two", "", []string{"encrypt", "--key", key, plain, "fe80::1%eth0"}, ExitUsage, "",
			"error: \"fe80::1%eth0\" has a zone; addresses of Pilaster are the same on every interface\n"},
		{"bad input", "nonsense\n", []string{"decrypt", "--key", key}, ExitUsage, "", "error: \"nonsense\" is not an " +
			"IPv6 address\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, stdout, stderr := run(t, c.stdin, append([]string{"address"}, c.args...)...)
			if code != c.code || stdout != c.stdout || stderr != c.stderr {
				t.Errorf("exit %d, stdout %q, stderr %q; want exit %d, stdout %q, stderr %q",
					code, stdout, stderr, c.code, c.stdout, c.stderr)
			}
		})
	}
}
