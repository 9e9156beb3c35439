package cli

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/address"
)

func newAddressCommand(env Env) *cobra.Command {
	c := &cobra.Command{
		Use:     "address",
		Short:   "Encrypt and decrypt addresses, offline",
		Example: "  pilaster address encrypt --key 000102030405060708090a0b0c0d0e0f fd70:696c:6100:1:0:100:100:3bc",
		Args:    cobra.NoArgs,
	}
	c.AddCommand(
		newCipherCommand(
			env,
			"encrypt",
			"plaintext",
			"ciphertext",
			(*address.Cipher).Encrypt,
			"fd70:696c:6100:1:0:100:100:3bc",
		),
		newCipherCommand(
			env,
			"decrypt",
			"ciphertext",
			"plaintext",
			(*address.Cipher).Decrypt,
			"fc88:83c1:cf8:1561:4d50:127a:8d8b:f640",
		),
	)
	return c
}

// newCipherCommand returns the command that encrypts or decrypts addresses, one per line.
func newCipherCommand(
	env Env,
	verb, from, to string,
	convert func(*address.Cipher, netip.Addr) netip.Addr,
	example string,
) *cobra.Command {
	var out output
	var hexKey string
	c := &cobra.Command{
		Use:   verb + " --key HEX [ADDRESS…]",
		Short: fmt.Sprintf("Print the %s address of each %s address", to, from),
		Long: fmt.Sprintf(`Print the %s address of each %s address, one per line, with the key of a tenant id
("pilaster tenant get NAME --show-key"). Without addresses, the command reads them from
standard input, one per line. It contacts no daemon.`, to, from),
		Example: fmt.Sprintf("  pilaster address %s --key 000102030405060708090a0b0c0d0e0f %s", verb, example),
		RunE: func(_ *cobra.Command, args []string) error {
			key, err := address.ParseKey(hexKey)
			if err != nil {
				return usage("--key: %w", err)
			}
			if len(args) == 0 {
				if args, err = lines(env.Stdin); err != nil {
					return fmt.Errorf("read addresses from standard input: %w", err)
				}
			}
			cipher := address.NewCipher(key)
			results := make([]map[string]netip.Addr, len(args))
			for i, arg := range args {
				a, err := address.Parse(arg)
				if err != nil {
					return usage("%w", err)
				}
				results[i] = map[string]netip.Addr{from: a, to: convert(cipher, a)}
			}
			return out.print(env.Stdout, results, func(w io.Writer) {
				for _, r := range results {
					fmt.Fprintln(w, r[to])
				}
			})
		},
	}
	c.Flags().StringVar(&hexKey, "key", "", "the tenant id's key, 32 hexadecimal digits")
	_ = c.MarkFlagRequired("key")
	out.bind(c)
	return c
}

func lines(r io.Reader) ([]string, error) {
	var found []string
	s := bufio.NewScanner(r)
	for s.Scan() {
		if s.Text() != "" {
			found = append(found, s.Text())
		}
	}
	return found, s.Err()
}
