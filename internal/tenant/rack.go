package tenant

// CheckRackName refuses names that are not a DNS label.
func CheckRackName(name string) error { return checkName("rack", name) }
