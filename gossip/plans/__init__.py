"""What a round is to do, and how it ends: plans, certificates, the rules for both. Sans-IO."""
