package cli

import (
	"os"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/demo"
)

func newDemoCommand(env Env) *cobra.Command {
	var o demo.Options
	c := &cobra.Command{
		Use:     "demo",
		Short:   "Bring a network of 3 nodes up on this machine, prove it, and take it down again",
		Example: "  pilaster demo\n  pilaster demo --keep",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if err := requireRoot("demo"); err != nil {
				return err
			}
			o.Command = os.Args[0]
			if o.Binary, err = os.Executable(); err != nil {
				return err
			}
			return demo.Run(c.Context(), env.Stdout, o)
		},
	}
	c.Flags().BoolVar(&o.Keep, "keep", false, "leave the network up and say how to look around")
	c.Flags().StringVar(&o.Root, "lab-root", os.Getenv("PILASTER_LAB_ROOT"), "folder of all labs (PILASTER_LAB_ROOT)")
	return c
}
